"""Reading and writing of files in directories that other users can write to.

A reader sees the old content or the new content, never a mix. A directory of another user may
contain links to our files, pipes without a writer, devices and files of any size. The functions
here never block on them and never write through their links.
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
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from pipectl.errors import DataFileError, UsageError

T = TypeVar("T")
RUNS_VARIABLE = "PIPECTL_RUNS"
"""Environment variable that names the directory of runs; a job or an option overrides it."""
MAX_BYTES = 2**28
"""Maximum size of a data file, which another user may have written."""
_ROOT = 0
_STALE_LOOKS = 4
_MAX_LINKS = 40
_PIECE, _PATIENCE_MS = 4096, 1000
"""Bytes that a writable pipe accepts at once, and how long to wait until it is writable."""
_STREAMS = (Path("/dev/fd"), Path("/proc/self/fd"))
_VARIABLE = re.compile(r"\$(?:(\$)|([A-Za-z_]\w*)|\{([A-Za-z_]\w*)\}|(\{))", re.ASCII)
_HOME = re.compile(r"^(?:~[\w.-]+(?=/)|~(?=/|$))")
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
"""Half of a surrogate pair in JSON, which cannot be encoded as UTF-8."""


def expand_path(text: str) -> str:
    """A path as a shell reads it: with a home directory for ``~`` and values for ``$VARIABLES``.

    ``$$`` stands for a ``$``. Without it, what a user wrote for another shell would become a
    directory of that name.

    Raises:
        ValueError: a user or a variable is unknown; says which.
    """
    user, slash, rest = text.partition("/")
    if user.startswith("~"):
        return f"{_home_of(user, text)}{slash}{_with_values(rest, text)}"
    return _with_values(text, text)


def expand_words(text: str, separator: str | None = None) -> str:
    """A text that need not be a path, as a shell reads it; see :func:`expand_path`.

    ``$~`` at the begin stands for a ``~``.

    Args:
        separator: after which a ``~`` stands for a home directory, as at the begin.

    Raises:
        ValueError: a user or a variable is unknown; does not say more of the text, which may be
            secret.
    """
    if text.startswith("$~"):
        return f"~{_with_values(text[2:], None)}"
    words = _with_values(text, None)
    return (separator or "").join(
        _HOME.sub(lambda match: _home_of(match[0], match[0]), part)
        for part in (words.split(separator) if separator else [words])
    )


def names_in(text: str) -> list[str]:
    """The variables that :func:`expand_path` replaces in a text."""
    return [match[2] or match[3] for match in _VARIABLE.finditer(text) if match[2] or match[3]]


def _home_of(user: str, text: str) -> str:
    home = os.path.expanduser(user)  # noqa: PTH111 - it may not be a path yet
    if home == user:
        raise ValueError(f"{text!r}: no home directory is known for {user}; write ./~ for a name")
    return home


def _with_values(text: str, whole: str | None) -> str:
    """A text with the values of its variables.

    Args:
        whole: what messages show; None for the name of the variable alone.
    """

    def value(match: re.Match[str]) -> str:
        dollar, plain, braced, other = match.groups()
        if dollar:
            return "$"
        shown = match[0] if whole is None else whole
        if other:
            raise ValueError(f"{shown!r}: a variable is written $NAME or ${{NAME}}, and $ alone $$")
        name = plain or braced
        if not os.environ.get(name):
            state = "is empty" if name in os.environ else "is not set"
            cure = "set it, or write the path"
            if whole is None:
                cure = "set it, or write $$ for a $"
            raise ValueError(f"{shown!r}: the variable {name} {state}; {cure}")
        return os.environ[name]

    return _VARIABLE.sub(value, text)


def escape_path(text: str) -> str:
    """What :func:`expand_path` turns into this path, which does not begin with ``~``."""
    return text.replace("$", "$$")


def escape_words(text: str) -> str:
    """What :func:`expand_words` turns into this text, if no separator is followed by ``~``."""
    return "$" * bool(_HOME.match(text)) + escape_path(text)


def path_of_user(text: str, *, variables: bool = True) -> Path:
    """A path that a user wrote; see :func:`expand_path`.

    Args:
        variables: whether it was not read by a shell, which expands variables.

    Raises:
        UsageError: it cannot be expanded.
    """
    try:
        return Path(expand_path(text if variables else escape_path(text)))
    except ValueError as error:
        raise UsageError(str(error)) from None


def write_text(path: Path, text: str, *, mode: int = 0o666, durable: bool = True) -> None:
    """Replace the content of ``path`` atomically (temporary file, fsync, rename).

    A new file is as private as its directory. Symbolic links are kept. Streams such as
    ``/dev/stdout`` are written in place. Links and pipes of other users are refused.

    Args:
        durable: whether to wait for the disk, so that the content survives a crash of the machine.

    Raises:
        UsageError: the file cannot be written; the previous file is unchanged.
    """
    try:
        place = _follow_links(path)
        number = _descriptor_of(place)
        if number is not None:
            sys.stdout.flush()  # keep the order of the output
            with os.fdopen(os.dup(number), "w", encoding="utf-8") as stream:
                stream.write(text)
        elif place.exists() and not place.is_file():
            _refuse_pipe_of_others(place.stat(), path)
            with place.open("w", encoding="utf-8") as stream:
                _refuse_pipe_of_others(os.fstat(stream.fileno()), path)
                stream.write(text)
        else:
            replace_file(place, text.encode(), mode, durable=durable)
    except BrokenPipeError:  # the reader is gone
        raise
    except OSError as error:
        raise _unwritable(path, error) from error


def write_log(log: int, text: str) -> None:
    """Write to a file descriptor as long as its reader accepts data, without waiting long.

    The reader of a job's log may be gone or frozen; the caller must neither fail nor hang.
    """
    data = text.encode(errors="replace")
    poll = select.poll()
    poll.register(log, select.POLLOUT)
    with suppress(OSError):
        while data and poll.poll(_PATIENCE_MS):
            data = data[os.write(log, data[:_PIECE]) :]


def make_directory(path: Path, *, private: bool = True) -> None:
    """Create a directory and its parents, or check that the existing one is writable.

    Args:
        private: whether new directories have mode 0700; else their mode follows the umask.

    Raises:
        UsageError: the directory cannot be created or written.
    """
    hint = "choose a directory you may write to"
    try:
        if private:
            make_private_directory(path)
        else:
            path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(
            f"{_shown(path)}: cannot be created: {error.strerror or error}", hint=hint
        ) from error
    if not os.access(path, os.W_OK | os.X_OK):
        is_read_only = os.statvfs(path).f_flag & os.ST_RDONLY
        reason = os.strerror(errno.EROFS if is_read_only else errno.EACCES)
        raise UsageError(f"{_shown(path)}: cannot be written: {reason}", hint=hint)


def make_private_directory(path: Path) -> None:
    """Create a directory and its missing parents with mode 0700.

    Raises:
        OSError: the directory cannot be created.
    """
    try:
        path.mkdir(0o700)
    except FileNotFoundError:
        make_private_directory(path.parent)
        path.mkdir(0o700, exist_ok=True)
    except OSError:
        if not path.is_dir():
            raise


def user_cache(name: str) -> Path | None:
    """Return the directory ``~/.cache/pipectl/NAME``, and create it if it is missing.

    Returns:
        None if it cannot be created, or if others could write there.
    """
    if (base := user_place("XDG_CACHE_HOME", ".cache")) is None:
        return None
    directory = base / "pipectl" / name
    try:
        make_private_directory(directory)
    except OSError:
        return None
    return None if fault_of_owner(directory, root=False) else directory


def user_place(variable: str, name: str) -> Path | None:
    """Return a directory of the XDG base directories: that of a variable, which is ignored if it is
    relative, else one in the home directory; None without that."""
    named = Path(os.environ.get(variable, ""))
    home = user_home()
    return named if named.is_absolute() else home and home / name


def user_home() -> Path | None:
    """Return the home directory of the user; None if none is known, as of some users of
    containers."""
    try:
        return Path.home()
    except RuntimeError:
        return None


def is_stream(path: Path) -> bool:
    """Return whether a path is an open stream such as ``/dev/stdout``, a device or a pipe."""
    try:
        place = _follow_links(path)
    except OSError:  # the write reports the error
        return False
    if _descriptor_of(place) is not None:
        return True
    return place.exists() and not (place.is_file() or place.is_dir())


def make_directory_of(path: Path, *, private: bool = True) -> None:
    """Create the directory of a file before the long work that ends with :func:`write_text`.

    Args:
        private: see :func:`make_directory`.

    Raises:
        UsageError: the file could not be written.
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
        raise UsageError(f"{path}: is a directory", hint="name a file in it")
    make_directory((place if path.is_symlink() else path).parent, private=private)


def write_json(path: Path, value: Any) -> None:
    """Replace the content of ``path`` by ``value`` as indented JSON; see :func:`write_text`."""
    write_text(path, json.dumps(value, indent=1, ensure_ascii=False) + "\n")


def read_json(path: Path, *, hint: str, limit: int = MAX_BYTES) -> dict[str, Any]:
    """Read the JSON object in ``path``, a file or an open stream such as ``/dev/stdin``.

    Args:
        hint: how to obtain the file, for errors.
        limit: maximum size in bytes.

    Raises:
        DataFileError: the file is missing, unreadable, truncated, or not a JSON object.
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
    raise DataFileError(f"{path}{fault}", hint=hint) from error


def _shown(path: Path) -> Path:
    """Return a path for messages, without ``..``."""
    return path.resolve() if ".." in path.parts else path


def _unwritable(path: Path, error: OSError) -> UsageError:
    return UsageError(
        f"{_shown(path)}: cannot be written: {error.strerror or error}",
        hint="choose a directory you may write to, or free some space",
    )


def replace_file(path: Path, content: bytes, mode: int, *, durable: bool) -> None:
    """Replace a regular file, or create it, atomically; :func:`write_text` also serves streams.

    Raises:
        OSError: the file cannot be written; the previous file is unchanged.
    """
    new = path.with_name(f".{path.name}.{os.urandom(4).hex()}")
    # The system applies the umask; a thread cannot read it without changing it for all threads.
    mode = _private_mode(path.parent, mode)
    handle = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    try:
        with os.fdopen(handle, "wb") as stream:
            stream.write(content)
            stream.flush()
            if durable:
                os.fsync(stream.fileno())
        new.replace(path)
    except BaseException:
        new.unlink(missing_ok=True)
        raise


def is_there(path: Path) -> bool:
    """Return whether a path exists, as far as this user may know."""
    try:
        _again_if_stale(path.stat)
    except OSError:
        return False
    return True


def is_missing(path: Path) -> bool:
    """Return whether a path certainly does not exist: not one in a directory that this user may not
    search."""
    try:
        _again_if_stale(path.stat)
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return False


def files_like(directory: Path, pattern: str) -> list[Path]:
    """Return the sorted paths in a directory that match; none if one may not look there."""
    try:
        return sorted(_again_if_stale(lambda: [*directory.glob(pattern)]))
    except OSError:
        return []


def is_of_another(path: Path) -> bool:
    """Return whether another user owns a file or directory; False if there is none."""
    return owner_number(path) not in (None, os.geteuid())


def owner_of(path: Path) -> str:
    """Return the name of the user whom a file or directory belongs to; empty if it is unknown."""
    owner = owner_number(path)
    return "" if owner is None else _name_of_user(owner)


def owner_number(path: Path) -> int | None:
    """Return the number of the user whom a file or directory belongs to; None if it is unknown."""
    try:
        return path.lstat().st_uid
    except OSError:
        return None


def _name_of_user(number: int) -> str:
    with suppress(KeyError):
        return pwd.getpwuid(number).pw_name
    return f"the user {number}"


def _again_if_stale(look: Callable[[], T]) -> T:
    """Look again if a network file system has forgotten which file a name stands for.

    It does where another node has just replaced the file.
    """
    for _ in range(_STALE_LOOKS):
        try:
            return look()
        except OSError as error:
            if error.errno != errno.ESTALE:
                raise
    return look()


def open_regular(path: Path, flags: int = os.O_RDONLY) -> int:
    """Open a regular file and return its descriptor.

    For writing, links of other users are refused, and a new file is as private as its directory.

    Raises:
        OSError: ``open`` fails, or the path is a directory, a pipe, a device or a refused link.
    """
    return _again_if_stale(lambda: _open_regular(path, flags))


def _open_regular(path: Path, flags: int) -> int:
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
    """Read a whole regular file.

    Raises:
        OSError: the file is unreadable, not regular, or larger than ``limit`` bytes.
    """

    def read() -> bytes:
        with open(_open_regular(path, os.O_RDONLY), "rb") as stream:
            return stream.read(limit + 1)

    content = _again_if_stale(read)
    if len(content) > limit:
        raise OSError(errno.EFBIG, f"larger than {limit >> 20} MiB", str(path))
    return content


def _follow_links(path: Path) -> Path:
    """Resolve the symbolic links of a path that is to be written.

    A link of another user is refused if it is the last component, or if other users can create
    links in its directory. A path to an open file of this process, such as ``/dev/stdout``,
    resolves to its entry in ``/proc`` and no further.

    Raises:
        OSError: a link is refused, or there are too many links.
    """
    waiting = list(reversed(path.absolute().parts))
    place, links = Path(waiting.pop()), 0
    while waiting:
        part = waiting.pop()
        inner = place / part if part != ".." else place.parent
        entry = None
        with suppress(FileNotFoundError, NotADirectoryError):  # opening the file reports the error
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
    """Return the file descriptor of this process that a resolved path stands for, or None."""
    is_one = place.name.isdecimal() and str(place.parent) == f"/proc/{os.getpid()}/fd"
    return int(place.name) if is_one else None


def _refuse_pipe_of_others(status: os.stat_result, path: Path) -> None:
    """Refuse a pipe or socket of another user, who could read the data or block the writer."""
    is_pipe = stat.S_ISFIFO(status.st_mode) or stat.S_ISSOCK(status.st_mode)
    if is_pipe and status.st_uid not in (os.geteuid(), _ROOT):
        raise OSError(errno.EACCES, "is a pipe of another user", str(path))


def _private_mode(directory: Path, mode: int) -> int:
    """Return the mode without the permissions that the directory denies to others."""
    try:
        around = directory.stat().st_mode
    except OSError:
        return mode
    return mode & (around | stat.S_IRWXU)


def fault_of_owner(path: Path, *, root: bool = True, groups: bool = True) -> str | None:
    """Return who else may have written a file or directory, in words; None if nobody else can.

    Args:
        root: whether to trust files of the system administrator.
        groups: whether write permission of a group counts, unless it is the user's private group.
    """
    try:
        owners = {path.lstat().st_uid, (status := path.stat()).st_uid}
    except OSError:
        return None  # opening the file reports the error
    for owner in owners - {os.geteuid(), *({_ROOT} if root else ())}:
        return f"belongs to {_name_of_user(owner)}"
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
    """Return whether a group is the user's private group: same name, no other members."""
    if group == _ROOT:
        return True
    try:
        owner, entry = pwd.getpwuid(user), grp.getgrgid(group)
    except KeyError:
        return False
    is_private = owner.pw_gid == group and entry.gr_name == owner.pw_name
    return is_private and set(entry.gr_mem) <= {owner.pw_name}
