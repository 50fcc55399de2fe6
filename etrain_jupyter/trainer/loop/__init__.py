"""Training loop: steps, evaluations, learning rate, and step records."""
