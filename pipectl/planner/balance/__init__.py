"""Partitions with the smallest largest stage load, with a proof: an objective of papers."""
