"""The life of a run: prepare, submit, tell its state, resume and cancel it; profiles and plans.

Throughout, ``now`` is the time in seconds since the epoch.
"""
