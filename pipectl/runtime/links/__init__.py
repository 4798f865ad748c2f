"""Measuring the links between ranks: an MPI program of its own."""
