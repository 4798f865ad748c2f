"""Stands in for ``python -m MODULE``, and for a Python that multiprocessing spawns.

The server, whose socket is beside it, forks that process. Signals go on to it. What the server is
not for, the Python that runs this does itself.
"""

import os
import signal
import socket
import sys
from contextlib import suppress


def forward(number: int, _: object) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, number)


if sys.argv[1] != "-m" and sys.argv[-1] != "--multiprocessing-fork":
    os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
# All that is open, those of the launcher and of multiprocessing too; listing opened one more.
files = [int(name) for name in os.listdir("/proc/self/fd")]  # noqa: PTH208
files = [number for number in files if os.path.exists(f"/proc/self/fd/{number}")]  # noqa: PTH110
with socket.socket(socket.AF_UNIX) as server:
    server.connect(os.path.join(os.path.dirname(__file__), "socket"))  # noqa: PTH118, PTH120
    numbers = ",".join(map(str, files))
    socket.send_fds(server, [f"{os.getpid()} {numbers}".encode()], files)
    with server.makefile("rb") as answer:
        pid = int(answer.readline())
        for name in ("HUP", "INT", "TERM", "USR1", "USR2"):
            signal.signal(getattr(signal, f"SIG{name}"), forward)
        code = int(answer.readline())
if code < 0:
    if -code != signal.SIGKILL:
        signal.signal(-code, signal.SIG_DFL)
    os.kill(os.getpid(), -code)
sys.exit(code)
