"""pipectl: pipeline-parallel training of any PyTorch model over MPI and a batch scheduler."""

__version__ = "0.2.0.dev0"
