from pipectl.runtime.transport.choice import Choice, Circumstances, choose_progress
from pipectl.runtime.transport.lanes import CHECK_VARIABLE, Line, Posted, Transport
from pipectl.runtime.transport.transfer import Progress, Transfer, Wire

__all__ = [
    "CHECK_VARIABLE",
    "Choice",
    "Circumstances",
    "Line",
    "Posted",
    "Progress",
    "Transfer",
    "Transport",
    "Wire",
    "choose_progress",
]
