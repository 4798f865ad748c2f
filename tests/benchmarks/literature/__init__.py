"""Planners of the literature, to check what is published of them: profile and links to stages,
replicas and ranks."""
