"""What passes between a trainer and its supervisor: messages, signs of life, faults on purpose.

``channel`` carries the messages, ``reporter`` keeps those of the last steps, ``progress`` is the
page of signs of life, ``faults`` does what a plan says, ``blame`` tells whose error one is.
"""
