from pipectl.runtime.transport.choice import Choice, Circumstances, choose_progress
from pipectl.runtime.transport.lanes import CHECK_VARIABLE, Line, Posted, Transport
from pipectl.runtime.transport.transfer import Flight, Progress, Wire

__all__ = [
    "CHECK_VARIABLE",
    "Choice",
    "Circumstances",
    "Flight",
    "Line",
    "Posted",
    "Progress",
    "Transport",
    "Wire",
    "choose_progress",
]
