"""Past-tense facts about a job, the durable log that holds them, and their replay."""
