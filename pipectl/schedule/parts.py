"""What of a micro-batch a stage computes, as lists of actions tell them apart."""

FORWARD, BACKWARD, WEIGHT = range(3)
"""``BACKWARD`` is a whole one, or its input half."""
