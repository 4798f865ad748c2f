"""Pictures, pages and traces of plans and runs."""
