"""User code and trackers that get each line of the metrics, on rank 0.

An error in them only gives a warning: no training ends because a metrics server is unavailable.
"""

from __future__ import annotations

import hashlib
import inspect
import json
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from pipectl.capture import factories
from pipectl.errors import CaptureError
from pipectl.faults import user_line
from pipectl.fields import leaves
from pipectl.older_python import Self
from pipectl.runs import RunDirectory
from pipectl.spec import JobSpec
from pipectl.spec.code_sections import Factory
from pipectl.spec.settings import values_for_others

Tell = Callable[[dict[str, Any]], object]


class Callbacks:
    """The callbacks of a job, by key; a context manager that closes them at its end.

    Args:
        warn: called when a callback fails; that callback is not called again.

    Raises:
        CaptureError: a callback cannot be created.
    """

    def __init__(self, spec: JobSpec, run: RunDirectory, warn: Callable[[str], None]) -> None:
        self._warn = warn
        self._functions: dict[str, Tell] = {}
        try:
            for name, factory in _factories(spec).items():
                function = factories.find(factory.factory)
                config = values_for_others(spec)  # since a logger sends it to a server
                arguments = run.path, config
                is_own = name.startswith("callbacks.")
                key = f"{name}.factory: {factory.factory}" if is_own else name
                tell = factories.call(function, key, *arguments, **factory.kwargs)
                if not callable(tell):
                    raise CaptureError(
                        f"{key}: returned a {type(tell).__name__}, which cannot be called",
                        hint="return a function of one line of the metrics, a dict",
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
        """Call all callbacks with a line; each gets a copy."""
        for name, tell in list(self._functions.items()):
            try:
                tell(dict(line))
            except Exception as error:  # training continues after any error
                del self._functions[name]
                self._warn(
                    f"{name}: {_raised(error)}; training continues, and it is not called again"
                )

    def close(self, failure: BaseException | None = None) -> None:
        """Call ``close`` of the callbacks that have it, once; its errors never replace the failure.

        Args:
            failure: the error that ends the training; passed to a ``close`` with such a parameter.
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


def import_callbacks(spec: JobSpec) -> None:
    """Import what callbacks and trackers need, without making them.

    Raises:
        CaptureError: something is not installed, or not there.
    """
    for name, factory in _factories(spec).items():
        factories.find(factory.factory)
        if not name.startswith("callbacks."):
            _import(name.removeprefix("tracking."))


def _factories(spec: JobSpec) -> dict[str, Factory]:
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
    except (TypeError, ValueError):  # a function without a signature, as some in C
        return False


TRACKERS = {
    "tensorboard": "pipectl.runtime.callbacks:TensorBoardRun",
    "wandb": "pipectl.runtime.callbacks:WandbRun",
    "mlflow": "pipectl.runtime.callbacks:MlflowRun",
}
"""The callback of each tracker."""

_MODULES = {"tensorboard": "torch.utils.tensorboard"}
"""Modules of trackers that have other names."""
_NOT_LOGGED = frozenset({"attempt", "step", "steps", "time"})
_TAG = "pipectl.run"
_MAX_PARAM = 500
"""Characters of a parameter that every MLflow server takes."""


class TensorBoardRun:
    """Event files for TensorBoard: numbers become scalars, by step.

    Args:
        run: the run directory.
        directory: of the event files, below it.

    Raises:
        CaptureError: TensorBoard is not installed.
    """

    def __init__(
        self,
        run: Path,
        config: Mapping[str, Any],  # noqa: ARG002
        directory: str = "tensorboard",
    ) -> None:
        writer = _import("tensorboard").SummaryWriter
        self._events = writer(str(run / directory))

    def __call__(self, line: Mapping[str, Any]) -> None:
        """Log a line of the metrics; metrics of evaluations are under ``evaluation/``."""
        for name, value in get_figures(line).items():
            self._events.add_scalar(name, value, line["step"], line.get("time"))

    def close(self) -> None:
        """Write the remaining events."""
        self._events.close()


class WandbRun:
    """A run of Weights & Biases, which every start of the job continues.

    Args:
        run: the run directory.
        config: the job.
        options: of ``wandb.init``; the default project is the job's name.

    Raises:
        CaptureError: wandb is not installed.
    """

    def __init__(self, run: Path, config: Mapping[str, Any], **options: Any) -> None:
        self._wandb = wandb = _import("wandb")
        defaults = {"project": config["name"], "name": run.name, "id": _id_of(run), "dir": str(run)}
        self._run = wandb.init(**{**defaults, "resume": "allow", "config": config, **options})
        # W&B's own step may not decrease; that of a resumed run does.
        self._run.define_metric("*", step_metric="step")

    def __call__(self, line: Mapping[str, Any]) -> None:
        """Log a line of the metrics."""
        self._run.log({**get_figures(line), "step": line["step"]})

    def close(self, failure: BaseException | None = None) -> None:
        """End the run, as failed or not."""
        self._run.finish(exit_code=int(failure is not None))
        self._wandb.teardown()  # waits for its process, which writes the files


class MlflowRun:
    """A run of MLflow, which every start of the job continues.

    Args:
        run: the run directory.
        config: the job; its values are the parameters of the run.
        experiment: by default the name of the job.
        tracking_uri: of the server; by default ``MLFLOW_TRACKING_URI``.

    Raises:
        CaptureError: mlflow is not installed.
    """

    def __init__(
        self,
        run: Path,
        config: Mapping[str, Any],
        experiment: str | None = None,
        tracking_uri: str | None = None,
    ) -> None:
        self._mlflow = mlflow = _import("mlflow")
        if tracking_uri is not None:
            mlflow.set_tracking_uri(tracking_uri)
        experiment_id = mlflow.set_experiment(experiment or config["name"]).experiment_id
        same = f"tags.`{_TAG}` = '{_id_of(run)}'"
        earlier = mlflow.search_runs([experiment_id], same, output_format="list", max_results=1)
        if earlier:
            mlflow.start_run(run_id=earlier[0].info.run_id)
        else:
            mlflow.start_run(run_name=run.name, tags={_TAG: _id_of(run)})
            mlflow.log_params(_parameters(config))

    def __call__(self, line: Mapping[str, Any]) -> None:
        """Log a line of the metrics."""
        self._mlflow.log_metrics(get_figures(line), step=line["step"])

    def close(self, failure: BaseException | None = None) -> None:
        """End the run, as failed or not."""
        self._mlflow.end_run("FINISHED" if failure is None else "FAILED")


def get_figures(line: Mapping[str, Any]) -> dict[str, float]:
    """The numbers in a line of the metrics by name; those of evaluations under ``evaluation/``."""
    figures = {name: line[name] for name in line.keys() - _NOT_LOGGED}
    evaluation = line.get("evaluation") or {}
    figures |= {f"evaluation/{name}": value for name, value in evaluation.items()}
    return {name: value for name, value in figures.items() if isinstance(value, int | float)}


def _parameters(config: Mapping[str, Any]) -> dict[str, str]:
    """The values that are set, by dotted key."""
    values = {key: value for key, value in leaves(config) if value not in (None, [], "")}
    texts = {key: v if isinstance(v, str) else json.dumps(v) for key, v in values.items()}
    return {key: text[:_MAX_PARAM] for key, text in texts.items()}


def _id_of(run: Path) -> str:
    """An id that is the same for every start of a run, and unique per run directory."""
    return f"{run.name}-{hashlib.sha256(bytes(run.resolve())).hexdigest()[:8]}"


def _import(name: str) -> Any:
    try:
        return import_module(_MODULES.get(name, name))
    except ImportError as error:
        raise CaptureError(
            f"tracking.{name}: cannot be imported: {error}", hint=f"pip install {name}"
        ) from None
