"""The use cases behind the commands: profile, plan, submit, status, resume, verify and others."""
