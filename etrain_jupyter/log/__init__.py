"""Events of a job, the durable log that holds them, and the fold over them."""
