"""Watching ranks from outside: one small process per node, which outlives whatever ends a rank.

Its modules are imported by that process: they use the standard library, and little of it.
"""
