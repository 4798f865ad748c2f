"""PipeFB: stages whose forward and backward run on different ranks."""

from pipectl.runtime.pipefb.stages import Announcements, add_lanes, make_half

__all__ = ["Announcements", "add_lanes", "make_half"]
