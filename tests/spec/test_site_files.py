"""Site defaults: machine < user < job file < command line."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipectl.errors import SpecError
from pipectl.spec import JobSpec, load, site_files


@pytest.fixture
def layered(tmp_path: Path, minimal: str):
    """Load the minimal spec with additions above two site files."""

    def load_layers(machine: str, user: str, job: str = "", *overrides: str) -> JobSpec:
        for name, text in (("machine", machine), ("user", user), ("job", minimal + job)):
            (tmp_path / f"{name}.yaml").write_text(text)
        sites = (tmp_path / "machine.yaml", tmp_path / "user.yaml")
        return load(tmp_path / "job.yaml", overrides, sites=sites)

    return load_layers


def test_each_layer_is_over_the_one_before(layered) -> None:
    partitions = [f"slurm: {{partition: {name}}}\n" for name in ("machine", "user", "job")]
    assert layered(partitions[0], "").slurm.partition == "machine"
    assert layered(*partitions[:2]).slurm.partition == "user"
    assert layered(*partitions).slurm.partition == "job"
    assert layered(*partitions, "slurm.partition=flag").slurm.partition == "flag"


def test_no_key_of_a_mapping_replaces_the_others(layered) -> None:
    spec = layered(
        "environment: {variables: {A: 1}}", "environment: {variables: {factory: 2, kwargs: 3}}"
    )
    assert spec.environment.variables == {"A": "1", "factory": "2", "kwargs": "3"}


def test_mappings_are_merged_and_lists_replaced(layered) -> None:
    spec = layered(
        "slurm: {account: a, qos: q}\n"
        "environment: {modules: [gcc, mpich], variables: {A: 1, B: 1}}",
        "slurm: {qos: r}\nenvironment: {modules: [clang], variables: {B: 2}}",
        "slurm: {partition: p}\nenvironment: {variables: {C: 3}}",
    )
    assert (spec.slurm.account, spec.slurm.qos, spec.slurm.partition) == ("a", "r", "p")
    assert spec.environment.modules == ("clang",)
    assert spec.environment.variables == {"A": "1", "B": "2", "C": "3"}


def test_null_removes_a_site_default(layered) -> None:
    spec = layered(
        "slurm: {account: a}\nlaunch: {args: [-v]}\nenvironment: {variables: {A: 1}}",
        "",
        "slurm: {account: null}\nlaunch:\nenvironment: {variables: {A: ~}}",
    )
    assert spec.slurm.account is None
    assert spec.launch.args == ()
    assert spec.environment.variables == {}


def test_a_cluster_file_is_looked_up_beside_the_site_file(layered, tmp_path: Path) -> None:
    (tmp_path / "cluster.json").write_text("{}")
    assert layered("", "cluster: ./cluster.json").cluster_file == tmp_path / "cluster.json"


def test_jobs_can_do_without_site_files(layered) -> None:
    assert layered("slurm: {qos: q}", "wrong: 1", "site_defaults: false\n").slurm.qos is None
    assert layered("slurm: {qos: q}", "", "", "site_defaults=false").slurm.qos is None


def test_absent_and_empty_site_files_say_nothing(tmp_path: Path, minimal: str) -> None:
    (tmp_path / "job.yaml").write_text(minimal)
    (tmp_path / "empty.yaml").write_text("# nothing\n")
    sites = (tmp_path / "absent.yaml", tmp_path / "empty.yaml")
    assert load(tmp_path / "job.yaml", sites=sites) == load(tmp_path / "job.yaml", sites=())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("slurm: {exclusive: 3}", "1:20: slurm.exclusive: must be true or false, not 3"),
        ("slurm: {part: a}", "1:9: slurm.part: unknown key; did you mean 'partition'?"),
        ("version: 2", "1:10: version: is 2; this pipectl reads version 1"),
        ("a: [", "1:5: not valid YAML: it ends inside a bracket that is not closed"),
        ("- a", " must be a mapping of keys to values"),
        (
            "\ntraining: {steps: 3}",
            "2:1: training: a site file cannot set this; known are version, resources, launch, "
            "environment, checkpoint, trace, output, cluster, slurm, pbs",
        ),
    ],
)
def test_problems_name_the_site_file(layered, tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(SpecError) as caught:
        layered("", text)
    assert caught.value.message == f"{tmp_path / 'user.yaml'}:{message}"


def test_problems_of_all_files_are_told_together(layered, tmp_path: Path) -> None:
    with pytest.raises(SpecError) as caught:
        layered("slurm: {a: 1}", "pbs: {b: 1}", "output: {c: 1}")
    files = [Path(problem.file).name for problem in caught.value.problems]
    assert files == ["job.yaml", "machine.yaml", "user.yaml"]


def test_where_site_files_are_looked_for(tmp_path: Path, monkeypatch) -> None:
    machine = Path("/etc/pipectl/site.yaml")
    assert site_files({"XDG_CONFIG_HOME": "/config"}) == (
        machine,
        Path("/config/pipectl/site.yaml"),
    )
    monkeypatch.setenv("HOME", str(tmp_path))
    user = tmp_path / ".config" / "pipectl" / "site.yaml"
    assert site_files({}) == (machine, user)
    assert site_files({"XDG_CONFIG_HOME": "relative"}) == (machine, user)


def test_the_users_site_file_is_read_by_default(tmp_path: Path, minimal, monkeypatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    (tmp_path / "pipectl").mkdir()
    (tmp_path / "pipectl" / "site.yaml").write_text("pbs: {queue: site}")
    (tmp_path / "job.yaml").write_text(minimal)
    assert load(tmp_path / "job.yaml").pbs.queue == "site"
