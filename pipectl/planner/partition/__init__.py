"""Cuts of a graph into stages: the dynamic programme, the estimate of a step, and moves."""
