"""How a transfer passes the parts of its way. Compiled.

Every part of the way carries one transfer at a time, in the order in which they were ready, for a
time that depends on the part's link and the bytes. A transfer begins on a part when it has begun on
the one before and the part is free, and is over a latency after all parts have carried it: parts
work at once, as the switches of a network do, and a fast part that waits for a slow one is free for
others.
"""

from __future__ import annotations

import numpy as np

from pipectl.arrays import Floats
from pipectl.compiled import part_of_kernel
from pipectl.simulate.tables import Network


@part_of_kernel
def arrival(network: Network, free_at: Floats, stream: int, size_bytes: float, now: float) -> float:
    """When a transfer that is ready now is over; takes its place in the queues of its way."""
    begun, end = now, now
    for part in range(network.way[stream], network.way[stream + 1]):
        queue = network.queue[part]
        begun = max(begun, free_at[queue])
        free_at[queue] = begun + hold_s(network, network.link[part], size_bytes)
        end = max(end, free_at[queue])
    return end + float(network.latency_s[stream])


@part_of_kernel
def hold_s(network: Network, link: int, size_bytes: float) -> float:
    """The same as :meth:`pipectl.link.Link.hold_s`, from tables."""
    first, end = network.timing[link], network.timing[link + 1]
    bandwidth = network.link_bandwidth[link]
    if first == end:
        return float(size_bytes / bandwidth)
    sizes, times = network.timing_bytes, network.timing_s
    above = first + np.searchsorted(sizes[first:end], size_bytes)
    if above == first:
        time_s = times[first]
    elif above == end:
        time_s = times[end - 1] + (size_bytes - sizes[end - 1]) / bandwidth
    else:
        rise = (times[above] - times[above - 1]) * (size_bytes - sizes[above - 1])
        time_s = times[above - 1] + rise / (sizes[above] - sizes[above - 1])
    return max(0.0, float(time_s - network.link_latency_s[link]))
