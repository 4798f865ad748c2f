"""Reading and writing whole files: a reader sees the old content or the new, never half."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path
from typing import Any

from pipectl.access import (
    descriptor_of,
    follow_links,
    private_mode,
    read_limited,
    refuse_pipe_of_others,
)
from pipectl.errors import DataFileError, UsageError

_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
"""Half of a character in JSON, which cannot be written again."""

RUNS_VARIABLE = "PIPECTL_RUNS"
"""Variable of the environment: the directory of the runs, unless a job or an option names one."""
MAX_BYTES = 2**28
"""Limit for a data file, which another user may have written."""
_STREAMS = (Path("/dev/fd"), Path("/proc/self/fd"))


def write_text(path: Path, text: str, *, mode: int = 0o666, durable: bool = True) -> None:
    """Replace ``path`` by ``text`` at once (temporary file, fsync, rename).

    A new file is as private as its directory. Links stay; so does what is no file, such as
    ``/dev/stdout``: that is written to, even if it leads to a file. Links and pipes of other users
    are refused.

    Args:
        durable: whether to wait for the disk, so that the text outlives a crash of the machine.

    Raises:
        UsageError: the directory cannot be written; the previous file is untouched.
    """
    try:
        place = follow_links(path)
        number = descriptor_of(place)
        if number is not None:
            sys.stdout.flush()  # what was printed before comes before it
            with os.fdopen(os.dup(number), "w", encoding="utf-8") as stream:
                stream.write(text)
        elif place.exists() and not place.is_file():
            refuse_pipe_of_others(place.stat(), path)
            with place.open("w", encoding="utf-8") as stream:
                refuse_pipe_of_others(os.fstat(stream.fileno()), path)
                stream.write(text)
        else:
            _replace(place, text, mode, durable=durable)
    except BrokenPipeError:  # nobody reads it
        raise
    except OSError as error:
        raise _unwritable(path, error) from error


def make_directory(path: Path) -> None:
    """Create a directory and its parents, for us alone; one that exists is fine if it can be
    written.

    Raises:
        UsageError: it cannot be created, or not be written.
    """
    cure = "choose a directory you may write to"
    try:
        make_private_directory(path)
    except OSError as error:
        raise UsageError(
            f"{path}: cannot be created: {error.strerror or error}", cure=cure
        ) from error
    if not os.access(path, os.W_OK | os.X_OK):
        raise UsageError(f"{path}: cannot be written", cure=cure)


def make_private_directory(path: Path) -> None:
    """Create a directory and those above it that are missing, which nobody else may look into.

    Raises:
        OSError: it cannot be created.
    """
    try:
        path.mkdir(0o700)
    except FileNotFoundError:
        make_private_directory(path.parent)
        path.mkdir(0o700, exist_ok=True)
    except OSError:
        if not path.is_dir():
            raise


def is_stream(path: Path) -> bool:
    """Whether a path is no place for a file: ``/dev/stdout``, a device, or a pipe."""
    try:
        place = follow_links(path)
    except OSError:  # whoever writes there says so
        return False
    if descriptor_of(place) is not None:
        return True
    return place.exists() and not (place.is_file() or place.is_dir())


def make_directory_of(path: Path) -> None:
    """Make the directory in which :func:`write_text` is to write ``path``, before long work.

    Raises:
        UsageError: it could not be written there.
    """
    try:
        place = follow_links(path)
        if (number := descriptor_of(place)) is not None:
            os.fstat(number)
            return
        if is_stream(path):
            refuse_pipe_of_others(place.stat(), path)
            return
    except OSError as error:
        raise _unwritable(path, error) from error
    if place.is_dir():
        raise UsageError(f"{path}: is a directory", cure="name a file in it")
    make_directory((place if path.is_symlink() else path).parent)


def write_json(path: Path, value: Any) -> None:
    """Replace ``path`` by ``value`` as indented JSON; see :func:`write_text`."""
    write_text(path, json.dumps(value, indent=1, ensure_ascii=False) + "\n")


def read_json(path: Path, *, cure: str, limit: int = MAX_BYTES) -> dict[str, Any]:
    """The JSON object in ``path``, a file or an open one such as ``/dev/stdin``.

    Args:
        limit: bytes that it may have.

    Raises:
        DataFileError: missing, unreadable, truncated or no object; ``cure`` says how to get it.
    """
    try:
        text = _content(path, limit).decode("utf-8")
        value = json.loads(text)
        if _SURROGATE.search(text):
            json.dumps(value, ensure_ascii=False).encode()
    except FileNotFoundError:
        raise DataFileError(f"{path}: no such file", cure=cure) from None
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or error
        raise DataFileError(f"{path}: cannot be read: {why}", cure=cure) from error
    except json.JSONDecodeError as error:
        place = f"{path}:{error.lineno}:{error.colno}"
        raise DataFileError(
            f"{place}: not valid JSON ({error.msg}); truncated?", cure=cure
        ) from error
    except UnicodeEncodeError:
        raise DataFileError(f"{path}: holds a text that is no Unicode", cure=cure) from None
    except ValueError:
        raise DataFileError(f"{path}: holds a number of thousands of digits", cure=cure) from None
    except RecursionError:
        raise DataFileError(f"{path}: nested too deeply to be a data file", cure=cure) from None
    if not isinstance(value, dict):
        raise DataFileError(f"{path}: holds a {type(value).__name__}, not an object", cure=cure)
    return value


def _content(path: Path, limit: int) -> bytes:
    if path != Path("/dev/stdin") and path.parent not in _STREAMS:
        return read_limited(path, limit)
    with path.open("rb") as stream:
        return stream.read(limit)


def _unwritable(path: Path, error: OSError) -> UsageError:
    return UsageError(
        f"{path}: cannot be written: {error.strerror or error}",
        cure="choose a directory you may write to, or free some space",
    )


def _replace(path: Path, text: str, mode: int, *, durable: bool) -> None:
    """See :func:`write_text`."""
    new = path.with_name(f".{path.name}.{os.urandom(4).hex()}")
    # The system applies the umask, which no thread can ask for without changing that of all.
    mode = private_mode(path.parent, mode)
    handle = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as stream:
            stream.write(text)
            stream.flush()
            if durable:
                os.fsync(stream.fileno())
        new.replace(path)
    except BaseException:
        new.unlink(missing_ok=True)
        raise
