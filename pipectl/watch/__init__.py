"""Watching ranks from outside: a small process beside each, which outlives whatever ends the rank.

Its modules are imported by that process, which starts once a rank: they use the standard library,
and little of it.
"""
