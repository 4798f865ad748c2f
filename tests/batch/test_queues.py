"""Partitions and queues in what `sinfo`, `qstat` and `pbsnodes` print."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipectl.batch.queues import SINFO_FORMAT, Queue, parse_pbs, parse_sinfo, queues
from pipectl.errors import SchedulerError

DATA = Path(__file__).parents[1] / "data" / "scheduler"
MIB = 2**20


def sample(name: str) -> str:
    return "\n".join((DATA / name).read_text().splitlines()[1:-1])


def test_a_real_lab() -> None:
    assert parse_sinfo(sample("slurm/sinfo.txt")) == (
        Queue("debug", True, True, 3600, nodes=4, cores=4, memory_bytes=4000 * MIB, gpus=2),
    )


@pytest.mark.parametrize(
    ("limit", "seconds"),
    [
        ("infinite", None), ("2-00:00:00", 172800), ("30:00", 1800), ("1:00:00", 3600),
        ("n/a", None), ("UNLIMITED", None), ("", None), ("0:00", None),
    ],
)  # fmt: skip
def test_limits_of_time(limit: str, seconds: int | None) -> None:
    (queue,) = parse_sinfo(f"p|{limit}|1|2|1000|(null)|up")
    assert queue.walltime_s == seconds


def test_kinds_of_nodes_count_with_what_all_of_them_have() -> None:
    text = (
        "gpu|infinite|2|64+|250000+|gpu:a100:4(S:0-1),nvme:1|up\ngpu|infinite|3|32|90000|(null)|up"
    )
    assert parse_sinfo(text) == (Queue("gpu", nodes=5, cores=32, memory_bytes=90000 * MIB, gpus=0),)


def test_gpus_of_several_kinds_add_up() -> None:
    (queue,) = parse_sinfo("p|infinite|1|8|9000|gpu:a100:2,gpu:h200:3(S:1),gres:gpux:7|up")
    assert queue.gpus == 5


def test_memory_that_nobody_told_slurm_is_not_known() -> None:
    assert parse_sinfo("p|infinite|1|8|1|(null)|up")[0].memory_bytes is None


@pytest.mark.parametrize("text", ["", "garbage", "a|b", "|||||||||", "p|x|y|z|w|v|u"])
def test_what_is_no_partition_gives_no_limits(text: str) -> None:
    for queue in parse_sinfo(text):
        assert (queue.nodes, queue.cores, queue.memory_bytes, queue.walltime_s) == (
            0,
            0,
            None,
            None,
        )
    assert parse_pbs(text, text, text) == ()


def test_queues_of_pbs() -> None:
    found = parse_pbs(
        sample("pbs/qstat-Q-f.txt"), sample("pbs/qstat-B-f.txt"), sample("pbs/pbsnodes-a.txt")
    )
    node = {"cores": 4, "memory_bytes": 4026532 * 1024, "gpus": 1}
    assert found == (
        Queue("workq", True, True, 86400, nodes=2, **node),  # type: ignore[arg-type]
        Queue("small", False, True, 300, nodes=1, **node),  # type: ignore[arg-type]
        Queue("closed", False, False, None, nodes=2, **node),  # type: ignore[arg-type]
    )


def test_they_are_asked_as_written(slurm, pbs) -> None:
    slurm.replay("sinfo", "sinfo.txt")
    assert queues("slurm")[0].name == "debug"
    assert slurm.calls("sinfo") == [["-h", "-o", SINFO_FORMAT]]
    for command, name in (("qstat", "qstat-Q-f.txt"), ("pbsnodes", "pbsnodes-a.txt")):
        pbs.replay(command, name)
    assert [queue.name for queue in queues("pbs")] == ["workq", "small", "closed"]
    assert queues("local") == ()


def test_one_that_fails_says_so(slurm) -> None:
    slurm.answer("sinfo", stderr="slurm_load_partitions: Unable to contact slurm controller", rc=1)
    with pytest.raises(SchedulerError, match="Unable to contact"):
        queues("slurm")
