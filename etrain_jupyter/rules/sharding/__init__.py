"""Rules for state that is divided among the ranks: who holds which part, and what moves."""
