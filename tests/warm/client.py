"""Stands in for ``python -m MODULE`` and lets the server be it; signals go on to that process.

``client.py PYTHON SOCKET WORDS``; what the server is not for, that Python does itself.
"""

import os
import signal
import socket
import sys
from contextlib import suppress

sys.path.insert(0, os.path.dirname(__file__))  # noqa: PTH120

import message


def forward(number: int, _: object) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, number)


python, address, *words = sys.argv[1:]
if words[0] != "-m":
    os.execv(python, [python, *words])
with socket.socket(socket.AF_UNIX) as connection:
    connection.connect(address)
    message.send(connection, words)
    with connection.makefile("rb") as answer:
        pid = int(answer.readline() or b"0")
        if pid:
            for name in ("HUP", "INT", "TERM", "USR1", "USR2"):
                signal.signal(getattr(signal, f"SIG{name}"), forward)
        code = int(answer.readline() or b"70")
if code < 0:
    signal.signal(-code, signal.SIG_DFL) if -code != signal.SIGKILL else None
    os.kill(os.getpid(), -code)
sys.exit(code)
