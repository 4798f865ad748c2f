"""Costs of stages: time, messages and memory, on the devices and links of a cluster."""
