"""A command on a terminal of its own, ended by Ctrl-C: ``terminal.py SECONDS COMMAND...``."""

import os
import pty
import select
import signal
import sys
import time

PATIENCE_S = 30
seconds, *command = sys.argv[1:]
process, side = pty.fork()
if process == 0:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # processes in the background ignore it
    os.execvp(command[0], command)
ends, interrupted = time.monotonic() + float(seconds), False
while True:
    if not interrupted and time.monotonic() > ends:
        os.write(side, b"\x03")
        interrupted = True
    if time.monotonic() > ends + PATIENCE_S:
        os.kill(process, signal.SIGKILL)
    try:
        if select.select([side], [], [], 0.1)[0]:
            os.write(1, os.read(side, 1 << 16))
    except OSError:  # nobody is at the other side any more
        break
code = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
sys.exit(0 if code == 0 or (interrupted and code == 130) else 1)
