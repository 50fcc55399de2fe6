"""Events of a job, the durable log that stores them, and the fold over them."""
