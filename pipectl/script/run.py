"""Runs a user's training script up to its first optimizer step."""

from __future__ import annotations

import builtins
import hashlib
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from pipectl.errors import CaptureError
from pipectl.faults import user_line
from pipectl.objects import seed_everything
from pipectl.runs.sources import follow_imports
from pipectl.script.hooks import Seen, Taken, hooked
from pipectl.script.order import directory, own_signals
from pipectl.script.unwritten import unwritten
from pipectl.spec import JobSpec
from pipectl.spec.code import is_source, read_source

USER = "pipectl_user_"
"""Begins the names of modules that are made of the user's files."""


@dataclass(frozen=True)
class Command:
    """How a script is started.

    Args:
        file: its absolute path.
        arguments: of its command line.
        directory: its working directory.
        seed: of the random numbers when it starts, for a script that sets none.
        drawn_between_epochs: random numbers of 32 bits that it draws between two epochs.
    """

    file: str
    arguments: tuple[str, ...] = ()
    directory: str = ""
    seed: int = 0
    drawn_between_epochs: int = 0

    @classmethod
    def of(cls, spec: JobSpec) -> Command:
        """The command of the script of a job."""
        assert spec.script is not None
        script = spec.script
        return cls(
            script.file,
            script.arguments,
            script.directory or "",
            spec.training.seed,
            script.drawn_between_epochs,
        )

    @property
    def place(self) -> str:
        """The working directory, by default that of the file."""
        return self.directory or str(Path(self.file).parent)


def run_script(command: Command, seen: Seen | None = None) -> Seen:
    """Run a script until its first optimizer step, or as far as ``seen`` says, and return what was
    seen.

    Raises:
        CaptureError: the script fails, or ends without a step.
    """
    seen = Seen() if seen is None else seen

    def end(_: str) -> None:
        raise Taken

    try:
        # What it would do at its end, as in `finally: torch.save(...)`, is nothing to do here.
        with (
            unwritten(lambda: seen.stops > 0, end),
            hooked(seen),
            as_main(command) as (code, space),
        ):
            space["__builtins__"] = {**vars(builtins), "len": seen.recorder.length}
            exec(code, space)  # noqa: S102
    except Taken:
        return seen
    except CaptureError:
        raise
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt | MemoryError):
            raise
        if seen.is_over or (seen.ends and isinstance(error, SystemExit)):  # raised by its end
            return seen
        if isinstance(error, SystemExit) and not error.code:
            raise _no_step(command, seen) from None
        raise CaptureError(
            f"script: {command.file} raised {type(error).__name__}: {error}"
            f"{user_line(error.__traceback__)}",
            hint=_hint(error, seen, command),
        ) from error
    if seen.ends:
        return seen
    raise _no_step(command, seen)


def _no_step(command: Command, seen: Seen) -> CaptureError:
    file = command.file
    if seen.recorder.recordings:
        return CaptureError(
            f"script: {file} calls backward(), but no optimizer of torch makes a step",
            hint="update the parameters by an optimizer (torch.optim.SGD, say), not by hand",
        )
    return CaptureError(
        f"script: {file} ended without a step of an optimizer",
        hint="name the file that trains, with the arguments that make it train: after --",
    )


def _hint(error: BaseException, seen: Seen, command: Command) -> str:
    if isinstance(error, SystemExit):
        return "give the script its arguments: after -- for init, as script.arguments in the job"
    if seen.recorder.recordings and isinstance(error, TypeError | RuntimeError | AttributeError):
        return (
            "between backward() and the optimizer's step pipectl has no gradients: leave out what "
            "reads or changes them, or let an optimizer of torch and clip_grad_norm_ do it"
        )
    if isinstance(error, FileNotFoundError):
        return f"relative paths count from script.directory, now {command.place}"
    words = " ".join([f"python {command.file}", *command.arguments])
    return f"see whether the script runs without pipectl, in {command.place}: {words}"


@contextmanager
def as_main(command: Command) -> Iterator[tuple[Any, dict[str, Any]]]:
    """Let a script be ``__main__`` within the block, as ``python FILE ARGUMENTS`` does.

    Afterwards what it defines belongs to a module of another name, because this process has a
    ``__main__`` of its own.
    """
    path = Path(command.file)
    if not is_source(path):
        raise CaptureError(f"script.file: {path}: no such file", hint="correct the path")
    try:
        code = compile(read_source(path), str(path), "exec")
    except SyntaxError as error:
        raise CaptureError(
            f"script.file: {error.filename}:{error.lineno}: {error.msg}", hint="correct the file"
        ) from error
    digest = hashlib.blake2b(str(path).encode(), digest_size=6).hexdigest()
    module = ModuleType("__main__")
    module.__file__ = str(path)
    vars(module)["__builtins__"] = __builtins__
    name = f"{USER}{path.stem}_{digest}"
    main, arguments, search = sys.modules["__main__"], sys.argv, list(sys.path)
    sys.modules["__main__"] = sys.modules[name] = module
    sys.argv = [str(path), *command.arguments]
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))
    follow_imports()
    try:
        seed_everything(command.seed)
        with directory(command.place), own_signals(), warnings.catch_warnings():
            yield code, vars(module)
    finally:
        sys.modules["__main__"], sys.argv = main, arguments
        sys.path[:] = [*search, *(entry for entry in sys.path if entry not in search)]
        _rename(module, name)


def _rename(module: ModuleType, name: str) -> None:
    module.__name__ = name
    for value in list(vars(module).values()):
        if getattr(value, "__module__", None) == "__main__":
            try:
                value.__module__ = name
            except (AttributeError, TypeError):
                continue
