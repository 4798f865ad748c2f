"""User code that is told every line of the metrics, on rank 0: loggers of experiments, say.

What goes wrong in it is a warning: no training ends because a server of curves is away.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any

from pipectl.capture import factories
from pipectl.runs import RunDirectory
from pipectl.spec import JobSpec

Tell = Callable[[dict[str, Any]], object]


class Callbacks:
    """Those of a job, by their names.

    Args:
        warn: told when one fails; it is not called again then.

    Raises:
        CaptureError: one cannot be made.
    """

    def __init__(self, spec: JobSpec, run: RunDirectory, warn: Callable[[str], None]) -> None:
        self._warn = warn
        self._told: dict[str, Tell] = {
            name: _made(factory.factory, factory.kwargs, spec, run)
            for name, factory in spec.callbacks.items()
        }

    def __call__(self, line: Mapping[str, Any]) -> None:
        """Tell all of them a line; each gets a copy."""
        for name, tell in list(self._told.items()):
            self._attempt(name, partial(tell, dict(line)))

    def close(self) -> None:
        """Call ``close()`` of those that have it."""
        for name, tell in list(self._told.items()):
            self._attempt(name, getattr(tell, "close", lambda: None))
        self._told.clear()

    def _attempt(self, name: str, act: Callable[[], object]) -> None:
        try:
            act()
        except Exception as error:  # whatever it is, training goes on
            with suppress(KeyError):
                del self._told[name]
            place = factories.user_line(error.__traceback__)
            self._warn(
                f"callbacks.{name}: raised {type(error).__name__}: {error}{place}; training goes "
                "on, and it is not called any more"
            )


def _made(factory: str, kwargs: Mapping[str, Any], spec: JobSpec, run: RunDirectory) -> Tell:
    """What the user's function makes of the run directory and the job."""
    function = factories.find(factory, spec.base)
    config = spec.model_dump(mode="json")
    made: Tell = factories.call(function, factory, run.path, config, **kwargs)
    if not callable(made):
        raise factories.CaptureError(
            f"{factory}: returned a {type(made).__name__}, which cannot be called",
            cure="return a function of one line of the metrics, a dict",
        )
    return made
