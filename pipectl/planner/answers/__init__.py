"""Answers to questions about a plan: why, what else, and how far it scales."""
