"""Reading and writing files where others may have put something.

A reader sees the old content or the new, never half. Directories of other users hold whatever they
like: links to files of ours, pipes that nobody writes to, devices, files of any size. Nothing here
waits for them, or follows their links to write.
"""

from __future__ import annotations

import errno
import grp
import json
import os
import pwd
import re
import select
import stat
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from pipectl.errors import DataFileError, UsageError

RUNS_VARIABLE = "PIPECTL_RUNS"
"""Variable of the environment: the directory of the runs, unless a job or an option names one."""
MAX_BYTES = 2**28
"""Limit for a data file, which another user may have written."""
_ROOT = 0
_MAX_LINKS = 40
_PIECE, _PATIENCE_MS = 4096, 1000
"""Bytes that a pipe takes at once if it is writable, and the wait until it is."""
_STREAMS = (Path("/dev/fd"), Path("/proc/self/fd"))
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
"""Half of a character in JSON, which cannot be written again."""


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
        place = _follow_links(path)
        number = _descriptor_of(place)
        if number is not None:
            sys.stdout.flush()  # what was printed before comes before it
            with os.fdopen(os.dup(number), "w", encoding="utf-8") as stream:
                stream.write(text)
        elif place.exists() and not place.is_file():
            _refuse_pipe_of_others(place.stat(), path)
            with place.open("w", encoding="utf-8") as stream:
                _refuse_pipe_of_others(os.fstat(stream.fileno()), path)
                stream.write(text)
        else:
            _replace(place, text, mode, durable=durable)
    except BrokenPipeError:  # nobody reads it
        raise
    except OSError as error:
        raise _unwritable(path, error) from error


def write_log(log: int, text: str) -> None:
    """Write to a file descriptor as far as its reader takes it, without waiting long.

    The reader of a job's log may be gone or frozen; the caller must neither end nor hang.
    """
    data = text.encode(errors="replace")
    poll = select.poll()
    poll.register(log, select.POLLOUT)
    with suppress(OSError):
        while data and poll.poll(_PATIENCE_MS):
            data = data[os.write(log, data[:_PIECE]) :]


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
        place = _follow_links(path)
    except OSError:  # whoever writes there says so
        return False
    if _descriptor_of(place) is not None:
        return True
    return place.exists() and not (place.is_file() or place.is_dir())


def make_directory_of(path: Path) -> None:
    """Make the directory in which :func:`write_text` is to write ``path``, before long work.

    Raises:
        UsageError: it could not be written there.
    """
    try:
        place = _follow_links(path)
        if (number := _descriptor_of(place)) is not None:
            os.fstat(number)
            return
        if is_stream(path):
            _refuse_pipe_of_others(place.stat(), path)
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
    error: Exception | None = None
    try:
        if path == Path("/dev/stdin") or path.parent in _STREAMS:
            with path.open("rb") as stream:
                content = stream.read(limit)
        else:
            content = read_limited(path, limit)
        text = content.decode("utf-8")
        value = json.loads(text)
        if _SURROGATE.search(text):
            json.dumps(value, ensure_ascii=False).encode()
        if isinstance(value, dict):
            return value
        fault = f": contains a {type(value).__name__}, not an object"
    except FileNotFoundError:
        fault = ": no such file"
    except (OSError, UnicodeDecodeError) as caught:
        fault, error = f": cannot be read: {getattr(caught, 'strerror', None) or caught}", caught
    except json.JSONDecodeError as caught:
        fault = f":{caught.lineno}:{caught.colno}: not valid JSON ({caught.msg}); truncated?"
        error = caught
    except UnicodeEncodeError:
        fault = ": contains text that is not Unicode"
    except ValueError:
        fault = ": contains a number of thousands of digits"
    except RecursionError:
        fault = ": nested too deeply to be a data file"
    raise DataFileError(f"{path}{fault}", cure=cure) from error


def _unwritable(path: Path, error: OSError) -> UsageError:
    return UsageError(
        f"{path}: cannot be written: {error.strerror or error}",
        cure="choose a directory you may write to, or free some space",
    )


def _replace(path: Path, text: str, mode: int, *, durable: bool) -> None:
    new = path.with_name(f".{path.name}.{os.urandom(4).hex()}")
    # The system applies the umask, which no thread can ask for without changing that of all.
    mode = _private_mode(path.parent, mode)
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


def open_regular(path: Path, flags: int = os.O_RDONLY) -> int:
    """Open a regular file; its descriptor.

    To write, no link of another user is followed, and a new file is as private as its directory.

    Raises:
        OSError: as ``open`` does; or it is a pipe, a device, or a link that is not followed.
    """
    directory = path.parent
    if flags & os.O_ACCMODE == os.O_RDONLY:
        _refuse_special(path.stat(), path)  # some devices act when they are opened
    else:
        path = _follow_links(path)
        flags |= os.O_NOFOLLOW
    flags |= os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
    handle = os.open(path, flags, _private_mode(directory, 0o666))
    try:
        _refuse_special(os.fstat(handle), path)
    except BaseException:
        os.close(handle)
        raise
    return handle


def read_limited(path: Path, limit: int) -> bytes:
    """All of a regular file.

    Raises:
        OSError: it cannot be read, is not a regular file, or has more than ``limit`` bytes.
    """
    with open(open_regular(path), "rb") as stream:
        content = stream.read(limit + 1)
    if len(content) > limit:
        raise OSError(errno.EFBIG, f"larger than {limit >> 20} MiB", str(path))
    return content


def _follow_links(path: Path) -> Path:
    """The path, without links, to which a path to be written leads.

    A link of another user at its end is refused, and so is one on the way, in a directory where
    others can put links. What stands for an open file of this process, such as ``/dev/stdout``,
    leads to its place in ``/proc``, and no further.

    Raises:
        OSError: it leads through a link of another user, or through too many.
    """
    waiting = list(reversed(path.absolute().parts))
    place, links = Path(waiting.pop()), 0
    while waiting:
        part = waiting.pop()
        inner = place / part if part != ".." else place.parent
        entry = None
        with suppress(FileNotFoundError, NotADirectoryError):  # whoever opens it says so
            entry = inner.lstat()
        is_link = entry is not None and stat.S_ISLNK(entry.st_mode)
        if entry is None or not is_link or _descriptor_of(inner) is not None:
            place = inner
            continue
        links += 1
        if links > _MAX_LINKS:
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))
        foreign = entry.st_uid not in (os.geteuid(), _ROOT)
        if foreign and (not waiting or fault_of_owner(place)):
            raise OSError(errno.ELOOP, f"{inner} is a symbolic link of another user", str(path))
        target = inner.readlink()
        place = Path(target.anchor or place)
        waiting += reversed(target.relative_to(target.anchor).parts)
    return place


def _descriptor_of(place: Path) -> int | None:
    """The number of this process's open file, if that is what a path without links stands for."""
    is_one = place.name.isdecimal() and str(place.parent) == f"/proc/{os.getpid()}/fd"
    return int(place.name) if is_one else None


def _refuse_pipe_of_others(status: os.stat_result, path: Path) -> None:
    """Whoever made a pipe or socket reads what is written to it, or has the writer wait forever.

    Raises:
        OSError: it is one of another user.
    """
    is_pipe = stat.S_ISFIFO(status.st_mode) or stat.S_ISSOCK(status.st_mode)
    if is_pipe and status.st_uid not in (os.geteuid(), _ROOT):
        raise OSError(errno.EACCES, "is a pipe of another user", str(path))


def _private_mode(directory: Path, mode: int) -> int:
    """The mode for something new: for others as private as the directory that it is in."""
    try:
        around = directory.stat().st_mode
    except OSError:
        return mode
    return mode & (around | stat.S_IRWXU)


def fault_of_owner(path: Path, *, root: bool = True, groups: bool = True) -> str | None:
    """Who else may have written a file or directory, in words; None if nobody else can have.

    Args:
        root: whether files of the system's administrator are as good as ours.
        groups: whether members of a group that may write it count.
    """
    try:
        owners = {path.lstat().st_uid, (status := path.stat()).st_uid}
    except OSError:
        return None  # whoever opens it says why
    for owner in owners - {os.geteuid(), *({_ROOT} if root else ())}:
        name = f"the user {owner}"
        with suppress(KeyError):
            name = pwd.getpwuid(owner).pw_name
        return f"belongs to {name}"
    if status.st_mode & stat.S_IWOTH:
        return "can be changed by everybody"
    if groups and status.st_mode & stat.S_IWGRP and not _is_of_one(status.st_gid, status.st_uid):
        name = str(status.st_gid)
        with suppress(KeyError):
            name = grp.getgrgid(status.st_gid).gr_name
        return f"can be changed by the group {name}"
    return None


def _refuse_special(status: os.stat_result, path: Path) -> None:
    if stat.S_ISDIR(status.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, "is not a regular file", str(path))


def _is_of_one(group: int, user: int) -> bool:
    """Whether a group is a user's own, as many systems give one of the same name to everybody."""
    if group == _ROOT:
        return True
    try:
        owner, entry = pwd.getpwuid(user), grp.getgrgid(group)
    except KeyError:
        return False
    is_private = owner.pw_gid == group and entry.gr_name == owner.pw_name
    return is_private and set(entry.gr_mem) <= {owner.pw_name}
