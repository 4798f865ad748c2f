"""The simulator: step time and memory of a plan on a cluster, without running the plan."""

from pipectl.simulate.simulation import Simulation, simulate

__all__ = ["Simulation", "simulate"]
