"""The simulator: what a plan's programs would take on a cluster, without running them."""

from pipectl.simulate.simulation import COMPUTE_KINDS, Simulation, simulate

__all__ = ["COMPUTE_KINDS", "Simulation", "simulate"]
