"""PipeFB: stages whose forward and backward run on different ranks."""

from pipectl.runtime.pipefb.stages import add_lanes, make_half

__all__ = ["add_lanes", "make_half"]
