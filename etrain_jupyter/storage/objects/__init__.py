"""Object storage: one client for S3 and compatible services."""
