"""Kinds of devices, the ranks that stages can have, and clusters with something changed."""
