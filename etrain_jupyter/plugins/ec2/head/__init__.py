"""The scheduler's side of the EC2 pool: the thread that reconciles the fleet."""
