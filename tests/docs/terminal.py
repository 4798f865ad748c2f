"""A command on a terminal of its own, ended by Ctrl-C: ``terminal.py SECONDS COMMAND...``."""

import os
import pty
import signal
import sys
from contextlib import suppress
from threading import Timer

seconds, *command = sys.argv[1:]
process, side = pty.fork()
if process == 0:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # processes in the background ignore it
    os.execvp(command[0], command)
ctrl_c = Timer(float(seconds), os.write, (side, b"\x03"))
ctrl_c.start()
with suppress(OSError):  # nobody is at the other side any more
    while True:
        os.write(1, os.read(side, 1 << 16))
ctrl_c.cancel()
code = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
sys.exit(0 if code in (0, 130) else 1)
