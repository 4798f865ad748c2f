"""What stages do with the values their backward needs."""
