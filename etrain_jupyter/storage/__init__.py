"""Storage: objects in a bucket, checkpoints, and logs kept in a bucket."""
