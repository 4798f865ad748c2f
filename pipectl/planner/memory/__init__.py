"""What stages hold at once."""
