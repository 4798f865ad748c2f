"""Partitions of a graph into a given number of stages."""
