"""User code that is told the metrics, or computes those of held-out data."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np
import pytest
import torch

from pipectl.errors import CaptureError
from pipectl.runs import RunDirectory
from pipectl.runtime.callbacks import Callbacks
from pipectl.runtime.evaluation_metrics import Metrics
from pipectl.spec import JobSpec

CODE = """
import json

def lines(run, config, name="lines.jsonl"):
    (run / "config.json").write_text(json.dumps(config))
    def tell(line):
        with (run / name).open("a") as stream:
            stream.write(json.dumps(line) + "\\n")
        line.clear()
    return tell

class Closing:
    def __init__(self, run, config):
        self.run = run
    def __call__(self, line):
        (self.run / "called").open("a").write("x")
        raise ConnectionError("no server")
    def close(self):
        (self.run / "closed").open("a").write("x")

class Knowing(Closing):
    def close(self, failure):
        (self.run / "failures").open("a").write(repr(failure))
        raise SystemExit("and this is not heard")

class Loud(Closing):
    def close(self):
        raise RuntimeError("no end")

def nothing(run, config):
    pass
"""
SECRET = {
    "environment": {
        "variables": {"API_KEY": "swordfish"},
        "setup": ["export B=swordfish"],
        "teardown": ["curl -H 'Authorization: swordfish' https://localhost"],
    }
}
LINE = {"attempt": 1, "step": 3, "loss": 0.5, "learning_rate": None, "time": 1.7e9}


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return RunDirectory.create(tmp_path, "tiny", 1.7e9)


@pytest.fixture
def job(make_spec: Any, tmp_path: Path) -> Callable[..., JobSpec]:
    """``job(tracking, **callbacks)``: by their names in the code above, some with arguments."""
    code = tmp_path / "mine.py"
    code.write_text(CODE)

    def make(tracking: Any = None, **callbacks: Any) -> JobSpec:
        factories = {
            key: {"factory": f"{code}:{name}", "kwargs": kwargs}
            for key, given in callbacks.items()
            for name, kwargs in [given if isinstance(given, tuple) else (given, {})]
        }
        tracked = {} if tracking is None else {"tracking": tracking}
        return make_spec(1, callbacks=factories, **tracked, **SECRET)

    return make


def test_they_are_told_every_line_but_no_keys_and_tokens_and_one_that_fails_is_left_alone(
    job, run: RunDirectory
) -> None:
    """What they are given, they send to servers."""
    warned: list[str] = []
    spec = job(a="lines", failing="Closing", b=("lines", {"name": "b"}))
    told = Callbacks(spec, run, warned.append)
    for _ in range(3):
        told(LINE)
    told.close()
    assert (run.path / "lines.jsonl").read_text() == (run.path / "b").read_text()
    assert (run.path / "b").read_text().count('"loss": 0.5') == 3
    assert (run.path / "called").read_text() == "x"
    assert not (run.path / "closed").exists()
    (text,) = warned
    assert text.startswith("callbacks.failing: raised ConnectionError: no server (at ")
    assert "mine.py:17); training continues" in text
    config = (run.path / "config.json").read_text()
    assert '"batch_size": 4' in config
    assert '"modules": []' in config
    assert "swordfish" not in config


def test_the_end_or_a_failure_closes_them_once_and_a_failure_stays_the_error(
    job, run: RunDirectory
) -> None:
    warned: list[str] = []
    with Callbacks(job(a="Closing"), run, warned.append):
        pass
    spec = job(a="Closing", b="Knowing", c="Loud")
    with (
        pytest.raises(ValueError, match="in step 3"),
        Callbacks(spec, run, warned.append) as callbacks,
    ):
        raise ValueError("in step 3")
    callbacks.close()
    assert (run.path / "closed").read_text() == "xx"
    assert (run.path / "failures").read_text() == "ValueError('in step 3')"
    assert [line.partition(" (at")[0] for line in warned] == [
        "callbacks.c: its close() raised RuntimeError: no end",
        "callbacks.b: its close() raised SystemExit: and this is not heard",
    ]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nothing", r"^callbacks\.b\.factory: .*:nothing: returned a NoneType, which cannot be "),
        ("lines.no", "there is no 'lines.no'"),
    ],
)
def test_one_that_cannot_be_made_closes_those_before(
    job, run: RunDirectory, name: str, message: str
) -> None:
    with pytest.raises(CaptureError, match=message):
        Callbacks(job(a="Closing", b=name), run, print)
    assert (run.path / "closed").exists()


EVALUATION: dict[str, Any] = {"attempt": 1, "step": 4, "evaluation": {"accuracy": 0.75}}


@pytest.mark.parametrize("name", ["tensorboard", "wandb", "mlflow"])
def test_a_tracker_that_is_not_installed(
    job, run: RunDirectory, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(sys.modules, "torch.utils.tensorboard", raising=False)
    with pytest.raises(CaptureError, match="cannot be imported") as raised:
        Callbacks(job(name), run, print)
    assert raised.value.hint == f"pip install {name}"


def track(job, run: RunDirectory, name: str, **options: Any) -> None:
    """In two starts of one job: a step, then an evaluation."""
    warnings: list[str] = []
    for line in (LINE, EVALUATION):
        told = Callbacks(job({name: options}), run, warnings.append)
        told(line)
        told.close()
    assert warnings == []


def test_tensorboard_is_told_numbers_by_step(job, run: RunDirectory) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    track(job, run, "tensorboard", directory="curves")
    events = EventAccumulator(str(run.path / "curves"))
    events.Reload()
    assert set(events.Tags()["scalars"]) == {"loss", "evaluation/accuracy"}
    assert [(each.step, each.value) for each in events.Scalars("loss")] == [(3, 0.5)]


def test_wandb_without_a_server_leaves_what_it_would_send_in_the_run(
    job, run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("wandb", reason="pip install '.[tracking]'")
    monkeypatch.setenv("WANDB_MODE", "offline")
    track(job, run, "wandb", project="demo")
    files = [path for path in (run.path / "wandb").rglob("*") if path.is_file()]
    content = b"".join(path.read_bytes() for path in files)
    assert all(text in content for text in (b"demo", b"evaluation/accuracy", b"batch_size"))
    assert b"swordfish" not in content


def test_for_mlflow_two_starts_of_one_job_are_one_run(
    job, run: RunDirectory, tmp_path: Path
) -> None:
    mlflow = pytest.importorskip("mlflow", reason="pip install '.[tracking]'")
    track(job, run, "mlflow", tracking_uri=f"sqlite:///{tmp_path}/mlflow.db")
    (only,) = mlflow.search_runs(search_all_experiments=True, output_format="list")
    assert (only.info.run_name, only.info.status) == (run.name, "FINISHED")
    assert only.data.metrics == {"loss": 0.5, "evaluation/accuracy": 0.75}
    assert only.data.params["training.batch_size"] == "4"
    assert "swordfish" not in repr(only.data)


def evaluate(metric: Any) -> dict[str, float]:
    """What a metric gives for one micro-batch; losses and means are in test_equal_trainings."""
    metrics = Metrics({"rows": metric})
    metrics.add(4, 1.0, torch.zeros(4), None)
    return metrics.result()


class Given:
    """A metric that gives a value."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def update(self, *_: Any) -> None:
        pass

    def compute(self) -> Any:
        return self.value


@pytest.mark.parametrize(
    ("metric", "what", "hint"),
    [
        (lambda outputs, _: outputs[:3], "a tensor of shape [3]", ".mean()"),
        (Given(torch.eye(2)), "a tensor of shape [2, 2]", ".mean()"),
        (Given("good"), "a str", ".mean()"),
        (Given(torch.tensor(1j)), "a Tensor", ".mean()"),
        (Given(None), "nothing", "return a number"),
        (Given({"f1": 1.0}), "a dict with 'f1'", "name each of these metrics by itself"),
    ],
)
def test_a_metric_that_gives_no_number_is_named(metric: Any, what: str, hint: str) -> None:
    with pytest.raises(CaptureError) as raised:
        evaluate(metric)
    expected = f"evaluation.metrics.rows: must give one number, but gave {what}"
    assert raised.value.message == expected
    assert hint in (raised.value.hint or "")
    assert evaluate(Given(np.float32(0.5)))["rows"] == 0.5


def test_a_metric_that_cannot_be_copied_is_named() -> None:
    with pytest.raises(CaptureError, match=r"^evaluation.metrics.rows: raised TypeError: cannot "):
        evaluate(Given(Lock()))
