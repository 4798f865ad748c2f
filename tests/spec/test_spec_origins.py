"""Every value of a spec knows the line, or the flag, that it comes from."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from pipectl.spec import JobSpec, Origin, dump, load_with_origins

Origins = Callable[..., dict[str, Origin]]


@pytest.fixture
def origins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, minimal: str) -> Origins:
    """Load the minimal spec with a text behind it; its origins by dotted key."""
    monkeypatch.chdir(tmp_path)

    def found(added: str, *overrides: str, sites: tuple[str, ...] = ()) -> dict[str, Origin]:
        Path("job.yaml").write_text(minimal + added, encoding="utf-8")
        files = [Path(f"site{number}.yaml") for number in range(len(sites))]
        for file, text in zip(files, sites, strict=True):
            file.write_text(text, encoding="utf-8")
        _, every = load_with_origins(Path("job.yaml"), overrides, sites=files)
        return {".".join(map(str, origin.path)): origin for origin in every}

    return found


def written(origin: Origin) -> str:
    place = origin.place
    return "default" if place is None else f"{place.file}:{place.line}"


def test_the_layer_that_wins_is_the_one_that_is_named(origins: Origins) -> None:
    found = origins(
        "resources: {nodes: 2}\nslurm:\n  account: mine\n",
        "resources.tasks_per_node=4",
        sites=("slurm: {partition: small, qos: low}\n", "\nslurm: {partition: large}\n"),
    )

    assert written(found["training.steps"]) == "job.yaml:6"
    assert written(found["resources.nodes"]) == "job.yaml:7"
    assert written(found["slurm.account"]) == "job.yaml:9"
    assert written(found["slurm.qos"]) == "site0.yaml:1"
    assert written(found["slurm.partition"]) == "site1.yaml:2"
    assert written(found["resources.tasks_per_node"]) == "--set resources.tasks_per_node:0"
    assert written(found["resources.walltime"]) == "default"
    assert found["slurm.partition"].value == "large"
    assert found["resources.walltime"].value == "01:00:00"


def test_keyword_arguments_have_places_of_their_own(origins: Origins) -> None:
    found = origins("optimizer:\n  kwargs:\n    lr: 0.1\n    decay: null\n", "optimizer.kwargs.b=1")

    assert written(found["model.kwargs.in_features"]) == "job.yaml:3"
    assert written(found["optimizer.kwargs.lr"]) == "job.yaml:9"
    assert written(found["optimizer.kwargs.decay"]) == "job.yaml:10"
    assert written(found["optimizer.kwargs.b"]) == "--set optimizer.kwargs.b:0"
    assert written(found["optimizer.factory"]) == "default"


def test_the_short_form_of_a_factory_is_its_factory(origins: Origins) -> None:
    found = origins("lr_scheduler: torch.optim.lr_scheduler:ConstantLR\n")

    assert written(found["lr_scheduler.factory"]) == "job.yaml:7"
    assert written(found["lr_scheduler.kwargs"]) == "default"


def test_a_null_leaves_the_default(origins: Origins) -> None:
    found = origins("checkpoint: {keep: null}\n")

    assert written(found["checkpoint.keep"]) == "default"
    assert found["checkpoint.keep"].value == 3


def test_all_keys_are_there_in_the_order_of_the_reference(origins: Origins) -> None:
    found = origins("")

    tops = list(dict.fromkeys(str(origin.path[0]) for origin in found.values()))
    assert tops == list(JobSpec.model_fields)


def test_what_is_shown_is_what_is_dumped(
    tmp_path: Path, minimal: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("job.yaml").write_text(minimal, encoding="utf-8")
    spec, every = load_with_origins(Path("job.yaml"), sites=())

    text = dump(spec)
    for origin in every:
        assert f"{origin.path[-1]}:" in text, origin
