from pipectl.runtime.transport.checks import CHECK_VARIABLE, Message
from pipectl.runtime.transport.choice import Choice, Circumstances, choose_progress
from pipectl.runtime.transport.lanes import Posted, Transport
from pipectl.runtime.transport.progress import Progress

__all__ = [
    "CHECK_VARIABLE",
    "Choice",
    "Circumstances",
    "Message",
    "Posted",
    "Progress",
    "Transport",
    "choose_progress",
]
