"""Schedules with several stages per rank, or that split backwards."""
