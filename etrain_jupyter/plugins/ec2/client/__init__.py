"""The kernel's side of the EC2 pool: launch, check, describe, and reap."""
