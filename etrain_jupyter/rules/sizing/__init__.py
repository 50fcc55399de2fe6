"""Number of workers of each job: step time, goodput and allocation."""
