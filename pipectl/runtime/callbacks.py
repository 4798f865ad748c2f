"""User code that is told every line of the metrics, on rank 0: loggers of experiments, say.

What goes wrong in it is a warning: no training ends because a server of curves is away.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, Self

from pipectl.capture import factories
from pipectl.errors import CaptureError
from pipectl.faults import user_line
from pipectl.runs import RunDirectory
from pipectl.runtime.tracking import TRACKERS
from pipectl.spec import JobSpec
from pipectl.spec.models import Factory

Tell = Callable[[dict[str, Any]], object]


class Callbacks:
    """Those of a job, by their keys; as a context, closed at its end, however it ends.

    Args:
        warn: told when one fails; it is not called again then.

    Raises:
        CaptureError: one cannot be made.
    """

    def __init__(self, spec: JobSpec, run: RunDirectory, warn: Callable[[str], None]) -> None:
        self._warn = warn
        self._functions: dict[str, Tell] = {}
        try:
            for name, factory in _factories(spec).items():
                function = factories.find(factory.factory, spec.base)
                # Keys and tokens are left out, since a logger sends its config to a server.
                private = {"environment": {"variables", "setup"}}
                config = spec.model_dump(mode="json", exclude=private)
                arguments = run.path, config
                tell = factories.call(function, name, *arguments, **factory.kwargs)
                if not callable(tell):
                    raise CaptureError(
                        f"{name}: returned a {type(tell).__name__}, which cannot be called",
                        cure="return a function of one line of the metrics, a dict",
                    )
                self._functions[name] = tell
        except BaseException as error:
            self.close(error)
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _: object, failure: BaseException | None, __: object) -> None:
        self.close(failure)

    def __call__(self, line: Mapping[str, Any]) -> None:
        """Tell all of them a line; each gets a copy."""
        for name, tell in list(self._functions.items()):
            try:
                tell(dict(line))
            except Exception as error:  # whatever it is, training goes on
                del self._functions[name]
                self._warn(
                    f"{name}: {_raised(error)}; training continues, and it is not called again"
                )

    def close(self, failure: BaseException | None = None) -> None:
        """Call ``close`` of those that have it, once; nothing it raises replaces the failure.

        Args:
            failure: what ends the training; given to those whose ``close`` has such a parameter.
        """
        while self._functions:
            name, tell = self._functions.popitem()
            close = getattr(tell, "close", None)
            if close is None:
                continue
            try:
                close(failure=failure) if _takes_failure(close) else close()
            except BaseException as error:
                if failure is None and not isinstance(error, Exception):
                    raise
                self._warn(f"{name}: its close() {_raised(error)}")


def _factories(spec: JobSpec) -> dict[str, Factory]:
    """The callbacks of a job, by their keys: its own, and those of its trackers."""
    own = {f"callbacks.{name}": factory for name, factory in spec.callbacks.items()}
    trackers = {
        f"tracking.{name}": Factory(factory=TRACKERS[name], kwargs=options)
        for name, options in spec.tracking
        if options is not None
    }
    return own | trackers


def _raised(error: BaseException) -> str:
    return f"raised {type(error).__name__}: {error}{user_line(error.__traceback__)}"


def _takes_failure(close: Callable[..., object]) -> bool:
    try:
        return "failure" in inspect.signature(close).parameters
    except (TypeError, ValueError):  # of a function without a signature, as some in C
        return False
