"""The nodes that ranks are on, by the names that the batch system has for them."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable
from typing import TypeVar

_Node = TypeVar("_Node")


def node_name() -> str:
    """The batch system's name of this node: several of its nodes may share one host name."""
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()


def grouped(nodes: Iterable[_Node]) -> dict[_Node, list[int]]:
    """The ranks of every node, nodes by their first rank.

    Args:
        nodes: of every rank.
    """
    found: dict[_Node, list[int]] = {}
    for rank, node in enumerate(nodes):
        found.setdefault(node, []).append(rank)
    return found
