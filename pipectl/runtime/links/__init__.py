"""Measuring the links between ranks: an MPI program of its own, with torch for rows and sums."""
