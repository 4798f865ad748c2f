"""The life of a run: prepare, submit, query, resume and cancel it; profiles and plans of jobs.

Throughout, ``now`` is the time in seconds since the epoch.
"""
