"""Measuring the links between ranks: an MPI program of its own, which loads torch for rows and sums."""
