"""The JSON Schema and the reference are made from the models, and the checked-in copies agree."""

import json
import re
from pathlib import Path

import pytest
from spec_reference import reference_markdown

from pipectl.spec.schema import json_schema, properties

CHECKOUT = Path(__file__).parents[2]
REFERENCE = CHECKOUT / "docs" / "spec-reference.md"
SCHEMA = CHECKOUT / "configs" / "job.schema.json"
PAGE = REFERENCE.read_text("utf-8")


@pytest.mark.parametrize("path", [REFERENCE, SCHEMA], ids=lambda path: path.name)
def test_the_checked_in_copies_are_current(snapshot, path):
    text = reference_markdown(PAGE)
    if path == SCHEMA:
        text = json.dumps(json_schema(), indent=1, ensure_ascii=False) + "\n"
    snapshot(path, text)


def test_every_key_is_explained():
    for schema in (json_schema(), *json_schema()["$defs"].values()):
        for name in properties(schema):
            rows = re.findall(rf"^\| `{name}` \| (.+) \| (.*) \| (.*) \|$", PAGE, re.MULTILINE)
            assert rows, f"{name} is not in the reference"
            assert all(meaning for _, _, meaning in rows), f"{name} has no meaning"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "resources: {walltime: 1:30:00, memory_per_node: 8GiB, nodes: 1e0}",
        "resources: {walltime: 90, memory_per_node: 2097152.5}",
        "pipeline: {memory_limit: 4294967296, stages: auto, warm_up: auto, schedule: auto}",
        "pipeline: {stages: 1, warm_up: [2], schedule: 1f1b, recompute: none, replicas: 1}",
        "resources:\nslurm:\nlr_scheduler:\nenvironment: {variables: {A: , B: 1, C: true}}",
        "slurm: {account: 1234, options: {exclusive: true, nice: 5, x: [a, 7], qos: }}",
        "optimizer: torch.optim:SGD\nlr_scheduler: a.b:c",
        "evaluation: {data: a:b, metrics: {x: a:b, y: {factory: a:b, kwargs: {z: [1]}}, w: }}",
        "optimizer: {factory: a:b, kwargs: {1: {2: null}}}",
        "environment: {setup: ['', 'a', 3]}\nlaunch: {mpi: pmix, args: []}\nsite_defaults: false",
    ],
)
def test_the_schema_accepts_what_the_loader_accepts(read, by_schema, minimal, text):
    read(minimal + text)
    assert by_schema(minimal + text)


@pytest.mark.parametrize(
    "text",
    [
        "nam: x",
        "resources: {gpu_per_node: 1}",
        "resources: {nodes: 0}",
        "resources: {nodes: two}",
        "resources: 5",
        "pipeline: {schedule: gpip}",
        "pipeline: {warm_up: [0]}",
        "site_defaults: yes",
        "launch: {args: x}",
        "optimizer: AdamW",
        "lr_scheduler: {kwargs: {}}",
        "environment: {modules: [null]}",
        "environment: {container: [x]}",
        "evaluation: {every: 1}",
        "slurm: {options: {qos: {a: b}}}",
    ],
)
def test_the_schema_refuses_what_an_editor_can_tell(added, by_schema, minimal, text):
    added(text)
    assert not by_schema(minimal + text)
