"""Files and outputs that were changed at random: read, or refused with a documented error.

Every example begins with a valid document, damages it as data and as text, and does with it what
commands do. A few hundred run always, thousands with ``make torture``.
"""

import copy
import json
import math
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pipectl.batch.process import Completed
from pipectl.batch.slurm import SlurmScheduler
from pipectl.cli.lab.simulate import assume_cluster
from pipectl.cli.views.run import print_runs, runs_table
from pipectl.cluster import Cluster, assumed_cluster
from pipectl.errors import PipectlError
from pipectl.jobs.run_json import run_json
from pipectl.jobs.state import get_status
from pipectl.plan import Plan
from pipectl.planner import PlanRequest, make_plan
from pipectl.profile import Profile
from pipectl.runs import Best, Heartbeat, RankBeat, Record, RunDirectory
from pipectl.runtime.manifest import Manifest, Shard
from pipectl.simulate import simulate
from pipectl.spec import load

FEW, MANY = 40, 720
MAX_CPU_S = 20.0
"""For one example."""
DATA = Path(__file__).parents[1] / "data" / "scheduler" / "slurm"
SPEC = Path(__file__).parents[2] / "configs" / "gpt-stdlib.yaml"

DEEP: list[Any] = []
for _ in range(60):
    DEEP = [DEEP]
VALUES = st.sampled_from(
    [None, True, False, "", "x", "../../etc/passwd", "/etc/passwd", "\ud800", "\x1b[2J\n", "-1",
     "9" * 5000, 0, 1, 2, -1, 3.5, -0.0, 1e-320, 1e308, math.nan, math.inf, -math.inf, 2**31,
     2**63, 10**400, [], {}, [[]], [None], [0], ["x"], {"x": {}}, {"": 0}, DEEP]
)  # fmt: skip
ACTIONS = st.sampled_from(["delete", "double", "retype", "swap", "rename", "scale"])


def places(document: Any) -> list[tuple[Any, Any]]:
    """Every container with each of its keys."""
    found: list[tuple[Any, Any]] = []
    keys = document if isinstance(document, dict) else range(len(document))
    for key in keys:
        found.append((document, key))
        if isinstance(document[key], dict | list):
            found += places(document[key])
    return found


def change(document: Any, draw: Callable[..., Any]) -> None:
    """Damage one place of a document."""
    known = places(document)
    if not known:
        return
    holder, key = known[draw(st.integers(0, len(known) - 1))]
    action = draw(ACTIONS)
    if action == "delete":
        del holder[key]
    elif action == "double" and isinstance(holder, list):
        holder.insert(key, copy.deepcopy(holder[key]))
    elif action == "rename" and isinstance(holder, dict):
        holder[draw(st.sampled_from(["x", "", "version", "../x"]))] = holder.pop(key)
    elif action == "swap":
        other, place = known[draw(st.integers(0, len(known) - 1))]
        holder[key] = copy.deepcopy(other[place])
    elif action == "scale" and isinstance(holder[key], int | float):
        factor = draw(st.sampled_from([-1, 0, 1000, 10**9, 0.5, 1e-9]))
        with suppress(OverflowError):  # of an integer that is too large to be a float
            holder[key] = holder[key] * factor
    else:
        holder[key] = copy.deepcopy(draw(VALUES))  # others may change what is in it


def damage(text: str, draw: Callable[..., Any]) -> bytes:
    """Damage the bytes of a text, or leave them as they are."""
    octets, place = text.encode("utf-8", "surrogatepass"), draw(st.integers(0, len(text)))
    begin, end = octets[:place], octets[place:]
    damaged = [
        b"",
        begin,
        begin + draw(st.binary(max_size=6)) + end,
        begin + b"9" * 5000 + end,
        begin + b"[" * 100_000,
        octets * 2,
        b"\xef\xbb\xbf" + octets,
        text.encode("utf-16", "replace"),
        text.encode("latin-1", "replace"),
    ]
    return draw(st.sampled_from([octets, octets, octets, *damaged]))


NODES = [
    {"id": f"op{i}", "name": f"layer.{i}", "forward_s": 0.01, "backward_s": 0.02,
     "parameter_bytes": 2**20, "output_bytes": 1000, "gradient_bytes": 1000,
     "saved": [[f"op{i}", 1000]], "timings": {"1": [0.006, 0.012]}}
    for i in range(4)
]  # fmt: skip
PROFILE = {
    "version": 1, "name": "tiny", "source": "test", "micro_batch_size": 2, "nodes": NODES,
    "fingerprint": "abc", "process_baseline_bytes": 2**28,
    "optimizer": {"state_bytes_per_parameter": 2.0, "step_s_per_byte": 1e-10},
    "edges": [["op0", "op1"], ["op1", "op2"], ["op2", "op3"], ["op0", "op3"]],
}  # fmt: skip
CLUSTER = assumed_cluster("here", [1, 1], 1, None)
REQUEST = PlanRequest("tiny", 8, micro_batches=4, stages=2, schedule="1f1b")
RECORD = Record("tiny", "slurm", "tag 1", 1.7e9, 2, 1, 10)
HEARTBEAT, ERROR = "starts/1/heartbeat.json", "starts/1/errors/rank-0000.json"
LINE = {"attempt": 1, "step": 1, "steps": 2, "time": 0.0, "loss": 1.0, "step_time_s": 0.5,
        "samples_per_s": 2.0, "learning_rate": 0.1, "gradient_norm": None}  # fmt: skip
OTHER = {"attempt": 1, "step": 2, "time": 0.0}


def plan_of(profile: Profile, cluster: Cluster = CLUSTER) -> Plan:
    return make_plan(profile, cluster, REQUEST)


MANIFEST = "checkpoints/step-000003/manifest.json"


def manifest() -> Any:
    shard = Shard("rank-0000.safetensors", 1, "00", ("a",))
    with tempfile.TemporaryDirectory() as folder:
        best = Best(3, "loss", "min", -0.5)
        Manifest(3, 2, {"b": "a"}, (shard,), (shard,), best=best).save(Path(folder))
        return json.loads((Path(folder) / "manifest.json").read_text())


def documents() -> dict[str, Any]:
    """Valid ones, by the names of their files; ``metrics.jsonl`` has several."""
    ranks = (RankBeat(rank, "n", "n", 1, (0,), 0.1, 0.5, 1, 2) for rank in range(2))
    return {
        "job.yaml": yaml.safe_load(SPEC.read_text()),
        "profile.json": PROFILE,
        "cluster.json": CLUSTER.to_json(),
        "plan.json": json.loads(json.dumps(plan_of(Profile.from_json(PROFILE)).to_json())),
        MANIFEST: manifest(),
        "record.json": RECORD.with_state(1.7e9, "submitted", job_id="7").to_json(),
        HEARTBEAT: Heartbeat("training", 1, 2, 1, tuple(ranks), time=1.7e9).to_json(),
        ERROR: {"version": 1, "rank": 0, "stage": 0, "step": 1, "action": "x", "host": "n",
                "type": "E", "message": "m", "hint": None, "traceback": "t", "time": 1.0,
                "exit_code": 1},
        "metrics.jsonl": [LINE, {**OTHER, "evaluation": {"loss": 1.0}},
                          {**OTHER, "not_finite": {"gradient_of": "a", "stage": 1}}],
    }  # fmt: skip


def refusal_of(work: Callable[[], object]) -> PipectlError | None:
    try:
        work()
    except PipectlError as error:
        return error
    return None


def write(folder: Path, name: str, document: Any, draw: Callable[..., Any] | None) -> None:
    """Write a file, which is damaged if there is something to draw with."""
    texts = []
    for line in copy.deepcopy(document if isinstance(document, list) else [document]):
        for _ in range(draw(st.integers(0, 3)) if draw else 0):
            change(line, draw)
        text = yaml.safe_dump(line) if name.endswith("yaml") else json.dumps(line)
        texts.append(damage(text, draw) if draw else text.encode())
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).write_bytes(b"\n".join(texts))


def use_spec(folder: Path) -> None:
    for check_files in (False, True):
        load(folder / "job.yaml", sites=(), check_files=check_files)


def use_plan(folder: Path) -> None:
    plan = Plan.load(folder / "plan.json")
    simulate(plan, assume_cluster(plan))


def use_manifest(folder: Path) -> None:
    folder = (folder / MANIFEST).parent
    for shard in Manifest.load(folder).shards:
        assert (folder / shard.file).resolve().is_relative_to(folder.resolve())


def use_run(folder: Path) -> None:
    """Status never fails: it says what it can, and all of it can be printed."""

    def show() -> None:
        status = get_status(RunDirectory(folder), 1.7e9 + 60)
        json.dumps(run_json(status))
        runs_table([status])
        print_runs(status.run, [status])

    assert refusal_of(show) is None


def use_slurm(draw: Callable[..., Any]) -> None:
    answers = [path.read_text() for path in sorted(DATA.iterdir())]
    answer = damage(draw(st.sampled_from(answers)), draw).decode("utf-8", "replace")
    cells = st.sampled_from(["", "7", "7_1", "²", "9" * 5000, "N/A", "RUNNING", "x", "1:²"])
    rows = ["|".join(draw(st.lists(cells, min_size=7, max_size=8))) for _ in range(2)]
    said = Completed(draw(st.sampled_from([0, 0, 1])), "\n".join([answer, *rows, "tag"]), "")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("pipectl.batch.process.run", lambda *_, **__: said)
        slurm = SlurmScheduler()
        slurm.query(["7", "12"], since=draw(st.sampled_from([None, 0.0, 1.7e9])))
        slurm.find(draw(st.sampled_from(["tag", "", "x", "7"])))


FILES_OF_RUNS = ("record.json", HEARTBEAT, ERROR, "metrics.jsonl")
USES: dict[tuple[str, ...], Callable[[Path], object]] = {
    ("job.yaml",): use_spec,
    ("profile.json",): lambda folder: plan_of(Profile.load(folder / "profile.json")),
    ("plan.json",): use_plan,
    ("cluster.json",): lambda folder: plan_of(
        Profile.from_json(PROFILE), Cluster.load(folder / "cluster.json")
    ),
    ("record.json",): lambda folder: Record.load(folder / "record.json"),
    (MANIFEST,): use_manifest,
    (*FILES_OF_RUNS, MANIFEST, "plan.json"): use_run,
}


@pytest.mark.parametrize("files", [*USES, ()], ids=lambda files: files[-1] if files else "slurm")
@pytest.mark.parametrize(
    "count",
    [FEW, pytest.param(MANY, marks=[pytest.mark.torture, pytest.mark.timeout(7200)])],
)
def test_only_documented_errors_come_of_damaged_files(files, count, tmp_path):
    """One of the files is damaged, or what Slurm answers."""
    valid = documents()

    @settings(max_examples=count, deadline=None, database=None, derandomize=count == FEW,
              suppress_health_check=list(HealthCheck))  # fmt: skip
    @given(st.data())
    def run(data: st.DataObject) -> None:
        start = time.process_time()
        damaged = data.draw(st.sampled_from(files)) if files else None
        for name in files:
            write(tmp_path, name, valid[name], data.draw if name == damaged else None)
        refusal = refusal_of(lambda: USES[files](tmp_path) if files else use_slurm(data.draw))
        assert refusal is None or (refusal.message and 1 <= refusal.exit_code <= 6)
        str(refusal).encode()
        assert time.process_time() - start < MAX_CPU_S

    run()
