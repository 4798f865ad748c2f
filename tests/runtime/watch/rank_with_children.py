"""A rank that forks children, which end in every way there is, and prints what its pipe then has.

Last it gets a signal itself, so that there is something.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import signal
import sys
import time
from contextlib import suppress

from pipectl.runtime import watching


def tell_and_work(pipe: int) -> None:
    os.write(pipe, b".")
    time.sleep(60)


def end_children() -> list[int | None]:
    """At once, in the midst of its work, by a crash; their exit codes."""
    told, tells = os.pipe()
    fork = multiprocessing.get_context("fork").Process
    at_once = fork(target=time.sleep, args=(60,))
    working = fork(target=tell_and_work, args=(tells,))
    crashing = fork(target=signal.raise_signal, args=(signal.SIGSEGV,))
    for child in (at_once, working, crashing):
        child.start()
        if child is working:
            os.read(told, 1)
        if child is not crashing:
            child.terminate()
        child.join()
    return [at_once.exitcode, working.exitcode, crashing.exitcode]


if __name__ == "__main__":
    heard, pipe = os.pipe2(os.O_NONBLOCK)
    parent = os.getpid()
    with suppress(SystemExit), watching._last_words(pipe):
        codes = end_children()
        if os.fork() == 0:
            sys.exit()  # its error passes what the rank says in the end
        os.wait()
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, [])
        signal.signal(signal.SIGUSR1, lambda *_: None)
        signal.raise_signal(signal.SIGUSR1)
        print(codes, [*os.read(heard, 1000)], [*blocked], faulthandler.is_enabled())
    if os.getpid() != parent:
        os._exit(0)
