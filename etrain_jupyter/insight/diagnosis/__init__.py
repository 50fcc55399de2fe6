"""Find the cause that slows a job down, from the times in its log."""
