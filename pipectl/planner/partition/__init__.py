"""Cuts of a graph into stages: where it can be cut, what stages cost, and the dynamic programme."""
