"""Reading and writing whole files: a reader sees the old content or the new, never half."""

from __future__ import annotations

import json
import os
import re
import tempfile
from pathlib import Path
from typing import Any

from pipectl.errors import DataFileError, UsageError

_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
"""In JSON, a part of a character; half of one cannot be written again."""


def write_text(path: Path, text: str, *, mode: int = 0o666, durable: bool = True) -> None:
    """Replace ``path`` by ``text`` at once (temporary file, fsync, rename).

    Args:
        durable: whether to wait for the disk, so that the text outlives a crash of the machine.

    Raises:
        UsageError: the directory cannot be written; the previous file is untouched.
    """
    try:
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as stream:
                stream.write(text)
                stream.flush()
                if durable:
                    os.fsync(stream.fileno())
            Path(name).chmod(mode & ~_umask())
            Path(name).replace(path)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise
    except OSError as error:
        raise UsageError(
            f"{path}: cannot be written: {error.strerror or error}",
            cure="choose a directory you may write to, or free some space",
        ) from error


def make_directory(path: Path) -> None:
    """Create a directory and its parents; one that exists is fine if it can be written.

    Raises:
        UsageError: it cannot be created, or not be written.
    """
    cure = "choose a directory you may write to"
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(
            f"{path}: cannot be created: {error.strerror or error}", cure=cure
        ) from error
    if not os.access(path, os.W_OK | os.X_OK):
        raise UsageError(f"{path}: cannot be written", cure=cure)


def write_json(path: Path, value: Any) -> None:
    """Replace ``path`` by ``value`` as indented JSON; see :func:`write_text`."""
    write_text(path, json.dumps(value, indent=1, ensure_ascii=False) + "\n")


def read_json(path: Path, *, cure: str) -> dict[str, Any]:
    """The JSON object in ``path``.

    Raises:
        DataFileError: missing, unreadable, truncated or no object; ``cure`` says how to get it.
    """
    try:
        text = path.read_text(encoding="utf-8")
        value = json.loads(text)
        if _SURROGATE.search(text):
            json.dumps(value, ensure_ascii=False).encode()
    except FileNotFoundError:
        raise DataFileError(f"{path}: no such file", cure=cure) from None
    except (OSError, UnicodeDecodeError) as error:
        raise DataFileError(f"{path}: cannot be read: {error}", cure=cure) from error
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


def _umask() -> int:
    """The process's umask (which can only be read by setting it)."""
    mask = os.umask(0o077)
    os.umask(mask)
    return mask
