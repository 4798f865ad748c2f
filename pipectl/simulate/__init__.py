"""The simulator: what a plan's programs would take on a cluster, without running them."""

from pipectl.simulate.simulation import Simulation, simulate

__all__ = ["Simulation", "simulate"]
