"""Events of a job, the durable log that stores them, and the state derived from them."""
