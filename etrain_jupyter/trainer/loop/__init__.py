"""The training loop: steps, evaluation, learning rate, and step records."""
