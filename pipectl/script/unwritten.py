"""Keeps a script that runs on after its first step from changing anything outside of its process.

Python tells audit hooks of all that opens files, starts programs or reaches other hosts; the script
ends there. A hook stays for ever, so there is one, which does nothing without a guard.
"""

from __future__ import annotations

import os
import shutil
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import torch

_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_EVENTS = {
    "os.mkdir": "makes a directory",
    "os.remove": "removes a file",
    "os.rmdir": "removes a directory",
    "os.rename": "renames a file",
    "os.link": "links a file",
    "os.symlink": "links a file",
    "os.truncate": "changes a file",
    "os.system": "starts a program",
    "subprocess.Popen": "starts a program",
}
_SKIPPED = ((torch, "save"), *((shutil, name) for name in ("copy", "copy2", "copyfile", "move")))
_OWN_DIRECTORIES = "pymp-"
"""Begins the names of directories that Python makes for processes."""
_GUARDS: list[Callable[[str], None]] = []


@contextmanager
def unwritten(is_on: Callable[[], bool], refuse: Callable[[str], None]) -> Iterator[None]:
    """Call a function with what the main thread of this process is about to do, in words.

    Args:
        is_on: whether to do so by now; until then all is allowed.
        refuse: raises. ``torch.save`` and copies of what it saves do nothing instead.
    """

    def quiet(function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, **kwargs: None if is_on() else function(*args, **kwargs)

    def guard(words: str) -> None:
        if is_on() and threading.current_thread() is threading.main_thread():
            refuse(words)

    _add_hook()
    _GUARDS.append(guard)
    try:
        with ExitStack() as stack:
            for module, name in _SKIPPED:
                new = quiet(getattr(module, name))
                stack.enter_context(mock.patch.object(module, name, new))
            stack.enter_context(_safetensors(guard))
            yield
    finally:
        _GUARDS.remove(guard)


@contextmanager
def _safetensors(guard: Callable[[str], None]) -> Iterator[None]:
    """Guard the writer of safetensors, which Python does not see."""
    import safetensors.torch

    write = safetensors.torch.serialize_file

    def serialize_file(*args: Any, **kwargs: Any) -> None:
        guard("writes a file")
        write(*args, **kwargs)

    with mock.patch.object(safetensors.torch, "serialize_file", serialize_file):
        yield


@cache
def _add_hook() -> None:
    sys.addaudithook(_hear)


def _hear(event: str, args: tuple[Any, ...]) -> None:
    if _GUARDS and (words := _words_of(event, args)):
        for guard in _GUARDS:
            guard(words)


def _words_of(event: str, args: tuple[Any, ...]) -> str:
    """What an event changes outside of this process; empty for nothing."""
    if event == "socket.connect":  # a tuple is an address of the network
        return "connects to a host" if isinstance(args[1], tuple) else ""
    if event == "open":
        path, _, flags = args
        is_file = not isinstance(path, int) and not _name(path).startswith("/dev/")
        is_written = isinstance(flags, int) and flags & _WRITING
        return "opens a file for writing" if is_file and is_written else ""
    if event in _EVENTS and not Path(_name(args[0])).name.startswith(_OWN_DIRECTORIES):
        return _EVENTS[event]
    return ""


def _name(path: Any) -> str:
    with suppress(TypeError, ValueError):
        return os.fsdecode(path)
    return ""
