"""The agent that runs on each EC2 instance."""
