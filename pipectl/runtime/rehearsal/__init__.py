"""The rehearsal of a plan: another program for the same ranks, without torch."""
