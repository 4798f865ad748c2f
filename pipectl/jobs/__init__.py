"""The use cases behind the commands: profile, plan, submit, status, resume, verify and others.

Throughout, ``now`` is the time in seconds since the epoch.
"""
