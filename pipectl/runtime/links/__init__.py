"""Measuring the links between ranks: an MPI program of its own; two ranks load torch, for rows."""
