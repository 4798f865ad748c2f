"""What commands print: plans, runs and traces as text."""
