"""Who else could have written a file, and opening files where others may have put something.

Directories of other users hold whatever they like: links to files of ours, pipes that nobody
writes to, devices, files of any size. Nothing here waits for them or follows their links to write.
"""

from __future__ import annotations

import errno
import grp
import os
import pwd
import stat
from contextlib import suppress
from pathlib import Path

_ROOT = 0
_MAX_LINKS = 40


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
        path = follow_links(path)
        flags |= os.O_NOFOLLOW
    flags |= os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
    handle = os.open(path, flags, private_mode(directory, 0o666))
    try:
        _refuse_special(os.fstat(handle), path)
    except BaseException:
        os.close(handle)
        raise
    return handle


def read_limited(path: Path, limit: int) -> bytes:
    """All of a regular file.

    Raises:
        OSError: it cannot be read, is no regular file, or has more than ``limit`` bytes.
    """
    with open(open_regular(path), "rb") as stream:
        content = stream.read(limit + 1)
    if len(content) > limit:
        raise OSError(errno.EFBIG, f"larger than {limit >> 20} MiB", str(path))
    return content


def follow_links(path: Path) -> Path:
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
        if entry is None or not is_link or descriptor_of(inner) is not None:
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


def descriptor_of(place: Path) -> int | None:
    """The number of this process's open file, if that is what a path without links stands for."""
    is_one = place.name.isdecimal() and str(place.parent) == f"/proc/{os.getpid()}/fd"
    return int(place.name) if is_one else None


def refuse_pipe_of_others(status: os.stat_result, path: Path) -> None:
    """Whoever made a pipe or socket reads what is written to it, or has the writer wait for ever.

    Raises:
        OSError: it is one of another user.
    """
    is_pipe = stat.S_ISFIFO(status.st_mode) or stat.S_ISSOCK(status.st_mode)
    if is_pipe and status.st_uid not in (os.geteuid(), _ROOT):
        raise OSError(errno.EACCES, "is a pipe of another user", str(path))


def private_mode(directory: Path, mode: int) -> int:
    """The mode for something new: for others as private as the directory that it is in."""
    try:
        around = directory.stat().st_mode
    except OSError:
        return mode
    return mode & (around | stat.S_IRWXU)


def is_ours(directory: Path) -> bool:
    """Whether a directory is ours and nobody else can put files there."""
    return fault_of_owner(directory, root=False) is None


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
        return f"belongs to {_user(owner)}"
    if status.st_mode & stat.S_IWOTH:
        return "can be changed by everybody"
    if groups and status.st_mode & stat.S_IWGRP and not _is_of_one(status.st_gid, status.st_uid):
        return f"can be changed by the group {_group(status.st_gid)}"
    return None


def _refuse_special(status: os.stat_result, path: Path) -> None:
    if stat.S_ISDIR(status.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, "is no regular file", str(path))


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


def _user(number: int) -> str:
    try:
        return pwd.getpwuid(number).pw_name
    except KeyError:
        return f"the user {number}"


def _group(number: int) -> str:
    try:
        return grp.getgrgid(number).gr_name
    except KeyError:
        return str(number)
