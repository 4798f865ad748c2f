"""Stands in for ``python -m MODULE`` and lets the server be it.

``client.py PYTHON SOCKET WORDS``; what the server is not for, that Python does itself.
"""

import os
import signal
import socket
import sys

sys.path.insert(0, os.path.dirname(__file__))  # noqa: PTH120

import message

python, address, *words = sys.argv[1:]
if words[0] != "-m":
    os.execv(python, [python, *words])
with socket.socket(socket.AF_UNIX) as connection:
    connection.connect(address)
    message.send(connection, words)
    answer = connection.recv(16)
code = int(answer or b"70")
if code < 0:
    signal.signal(-code, signal.SIG_DFL) if -code != signal.SIGKILL else None
    os.kill(os.getpid(), -code)
sys.exit(code)
