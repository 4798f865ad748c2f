"""How tensors travel between ranks over MPI. Read this page first.

    step      makes                                                              in
    choose    Choice: what moves messages while a rank computes                  choice
    line      Line: one direction between two stages, between two ranks          lanes
    announce  layouts: sizes, types and strides, once per shape of micro-batch   lanes
    start     Posted: a message of all tensors of a line, not waited for         lanes
    move      Transfer: the bytes of one tensor, in pieces                       transfer
    finish    the tensors, in memory of their own                                lanes

Requirements: only what every MPI has, nonblocking messages between two ranks. Ranks know from the
plan which messages come, and in which order: after the warm-up pass no message has a header, and
the buffer of every receive is posted before it is needed. Tensors keep their strides, since the
bits of later sums depend on them. A sender's tensor is sent where it lies.

Accelerators: MPI reads the memory of the device if neighbours have shown that it can (gpu_aware);
else tensors are copied piece by piece through pinned memory (:mod:`pipectl.runtime.staging`).

Trade-offs: many MPIs advance a large message only within calls of both ranks. Calls between actions
cost nothing and hide little; a thread hides more and takes time from the computation. ``choice``
decides by a rule on measured links, not by a trial at the start, which would depend on the load of
that moment. Messages in pieces start later ones later; in exchange two ranks that send to each
other do not take turns over TCP, messages may exceed 2 GiB, and copies overlap with sends. There
are no one-sided and no persistent messages: they would shorten the start of a message, which is
short against the actions around it.

What would change if: values had shapes that differ from step to step: headers, and receives that
start when these arrive. Several tensors travel as one: ``Line`` packs them, which copies. Another
library moves the bytes (UCX, NCCL): ``Wire`` and ``transfer``; lines stay as they are.
"""

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
