"""A rank's peak stays within its limit while checkpoints are written."""
