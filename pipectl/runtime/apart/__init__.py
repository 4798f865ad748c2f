"""Stages whose forward and backward run on different ranks (PipeFB)."""

from pipectl.runtime.apart.agreement import Announcements
from pipectl.runtime.apart.backward_half import BackwardHalf
from pipectl.runtime.apart.forward_half import ForwardHalf
from pipectl.runtime.apart.making import add_lanes, make_half

__all__ = ["Announcements", "BackwardHalf", "ForwardHalf", "add_lanes", "make_half"]
