"""What the ranks of a job execute, on tensors and over MPI."""
