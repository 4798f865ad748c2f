"""Short messages between the processes beside the ranks: one datagram each, and none is vital.

They take no part in MPI, so that they get through when ranks are blocked in it. Each bears a word
that only ranks of the run know.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

_LARGEST = 60_000
_MOST_WORDS = 8_000


class Address(NamedTuple):
    """Where rank 0's watcher listens.

    Args:
        hosts: names of its node, the best first.
        secret: to be in every message.
    """

    hosts: Sequence[str]
    port: int
    secret: str


def listen() -> socket.socket:
    """A socket for datagrams on a free port."""
    found = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    found.bind(("", 0))
    return found


def resolve(address: Address) -> tuple[str, int] | None:
    """Where to send to; None where no name is known here."""
    for host in address.hosts:
        name = "127.0.0.1" if host == socket.gethostname() else host
        with suppress(OSError):
            found = socket.getaddrinfo(name, address.port, socket.AF_INET, socket.SOCK_DGRAM)
            return str(found[0][4][0]), address.port
    return None


class Wire:
    """A socket whose messages are dictionaries.

    Args:
        secret: see :class:`Address`.
    """

    def __init__(self, found: socket.socket, secret: str) -> None:
        self.socket = found
        self._secret = secret
        found.setblocking(False)

    def send(self, target: tuple[str, int] | None, content: Mapping[str, Any]) -> None:
        """Send; what cannot be sent now is lost, as it may be on its way."""
        if target is None:
            return
        fields = {**content, "words": str(content.get("words", ""))[:_MOST_WORDS]}
        with suppress(OSError):
            self.socket.sendto(json.dumps({**fields, "secret": self._secret}).encode(), target)

    def receive(self) -> list[tuple[dict[str, Any], tuple[str, int]]]:
        """All that has come, with where from; what is not of this run is dropped."""
        found = []
        with suppress(BlockingIOError):
            while True:
                try:
                    data, source = self.socket.recvfrom(_LARGEST)
                except ConnectionError:  # an earlier message found nobody
                    continue
                if (content := self._content(data)) is not None:
                    found.append((content, source))
        return found

    def _content(self, data: bytes) -> dict[str, Any] | None:
        try:
            content = json.loads(data)
        except ValueError:
            return None
        known = isinstance(content, dict) and content.get("secret") == self._secret
        return content if known else None
