"""The scheduler's side of the EC2 pool: the loop that reconciles the fleet."""
