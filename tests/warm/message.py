"""What a client asks the server to be, on its way through a socket."""

from __future__ import annotations

import json
import os
import socket
from dataclasses import dataclass

PMI = "PMI_FD"
"""Where the launcher names the file through which a rank talks to it."""
MOST_FILES = 4


@dataclass(frozen=True)
class Request:
    """A command line behind the interpreter, and what the process of it inherits.

    Attributes:
        files: standard input, output and error, and the launcher's.
    """

    words: list[str]
    directory: str
    environment: dict[str, str]
    files: list[int]

    def close(self) -> None:
        for number in self.files:
            os.close(number)


def send(connection: socket.socket, words: list[str]) -> None:
    """Ask for this process's surroundings, and some words."""
    environment = dict(os.environ)
    files = [0, 1, 2, *([int(environment[PMI])] if PMI in environment else [])]
    body = json.dumps([words, os.getcwd(), environment]).encode()  # noqa: PTH109
    socket.send_fds(connection, [len(body).to_bytes(8)], files)
    connection.sendall(body)


def receive(connection: socket.socket) -> Request | None:
    """None if the client ended meanwhile."""
    head, files, _, _ = socket.recv_fds(connection, 8, MOST_FILES)
    body = b""
    while head and len(body) < int.from_bytes(head):
        part = connection.recv(1 << 20)
        if not part:
            break
        body += part
    if not head or len(body) < int.from_bytes(head):
        for number in files:
            os.close(number)
        return None
    words, directory, environment = json.loads(body)
    if PMI in environment:
        environment[PMI] = str(files[3])
    return Request(words, directory, environment, files)
