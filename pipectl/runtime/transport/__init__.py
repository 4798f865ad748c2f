from pipectl.runtime.transport.checks import CHECK_VARIABLE
from pipectl.runtime.transport.choice import Choice, Circumstances, choose_progress
from pipectl.runtime.transport.lanes import Line, Posted, Transport
from pipectl.runtime.transport.progress import Progress
from pipectl.runtime.transport.wire import Flight, Wire

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
