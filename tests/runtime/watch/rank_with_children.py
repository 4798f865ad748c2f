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
from collections.abc import Callable
from contextlib import suppress

from pipectl.runtime import watching


def child(work: Callable[[], None]) -> multiprocessing.Process:
    process = multiprocessing.get_context("fork").Process(target=work)
    process.start()
    return process


def crash() -> None:
    os.kill(os.getpid(), signal.SIGSEGV)


def tell_and_work(pipe: int) -> None:
    os.write(pipe, b".")
    time.sleep(60)


def end_children() -> list[int | None]:
    """At once, in the midst of its work, by a crash; their exit codes."""
    at_once = child(lambda: time.sleep(60))
    at_once.terminate()
    told, tells = os.pipe()
    working = child(lambda: tell_and_work(tells))
    os.read(told, 1)
    working.terminate()
    children = [at_once, working, child(crash)]
    for each in children:
        each.join()
    return [each.exitcode for each in children]


def leave_as_the_rank_does() -> None:
    """A child by hand, whose error passes what the rank says in the end."""
    if os.fork():
        os.wait()
    else:
        sys.exit()


if __name__ == "__main__":
    heard, pipe = os.pipe()
    for end in (heard, pipe):
        os.set_blocking(end, False)
    parent = os.getpid()
    with suppress(SystemExit), watching._last_words(pipe):
        codes = end_children()
        leave_as_the_rank_does()
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, [])
        signal.signal(signal.SIGUSR1, lambda *_: None)
        signal.raise_signal(signal.SIGUSR1)
        print(codes, [*os.read(heard, 1000)], [*blocked], faulthandler.is_enabled())
    if os.getpid() != parent:
        os._exit(0)
