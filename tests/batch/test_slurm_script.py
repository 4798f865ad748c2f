import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from pipectl.batch import Array, JobRequest, MoreNodes, SlurmOptions
from pipectl.batch.local import LocalScheduler
from pipectl.batch.slurm_script import render_script
from pipectl.errors import InvalidInputError

MakeRequest = Callable[..., JobRequest]


def options(script: str) -> list[str]:
    prefix = "#SBATCH "
    return [line.removeprefix(prefix) for line in script.splitlines() if line.startswith(prefix)]


def test_memory_is_rounded_up_to_megabytes(make_request: MakeRequest) -> None:
    script = render_script(make_request(memory_per_node_bytes=2**20 + 1))
    assert "--mem=2M" in options(script)


@pytest.mark.parametrize("launcher", ["auto", "srun"])
def test_a_command_alone_is_started_without_mpi(make_request: MakeRequest, launcher: str) -> None:
    request = make_request(alone=True, launcher=launcher, command=("measure", "this model"))
    for script in (render_script(request), LocalScheduler().render(request)):
        assert script.splitlines()[-2:] == ["run with_variables measure 'this model'", 'exit "$?"']
        assert "mpiexec" not in script
        assert "srun" not in script


def test_absent_options_are_not_written(make_request: MakeRequest) -> None:
    names = {line.split("=")[0] for line in options(render_script(make_request()))}
    assert names == {
        "--job-name",
        "--comment",
        "--nodes",
        "--ntasks-per-node",
        "--cpus-per-task",
        "--time",
        "--chdir",
        "--output",
        "--open-mode",
        "--no-requeue",
    }


def test_directives_come_before_the_first_command(make_request: MakeRequest) -> None:
    lines = render_script(make_request()).splitlines()
    first = next(i for i, line in enumerate(lines) if line and not line.startswith("#"))
    assert not any(line.startswith("#SBATCH") for line in lines[first:])


def test_a_nasty_option_stays_on_its_line(make_request: MakeRequest, nasty: list[str]) -> None:
    for value in nasty:
        script = render_script(make_request(slurm=SlurmOptions(account=value)))
        assert len(options(script)) == 11
        subprocess.run(["bash", "-n"], input=script, text=True, check=True)


@pytest.mark.parametrize(
    "directive",
    [
        "--begin=now",
        "--gpus=4",
        "-S 1",
        "--switches=1@10",
        "#SBATCH --nice=5",
        "--switches=1 --nice=5",
        "--bb='x --mem=5G'",
        "--mem-per-cpu=1G",
        "--time-min=10",
        "-sH",
        "-Gtesla:2",
    ],
)
def test_own_directives_are_written_verbatim(make_request: MakeRequest, directive: str) -> None:
    request = make_request(slurm=SlurmOptions(directives=(directive,)))
    assert options(render_script(request))[-1] == directive.removeprefix("#SBATCH ")


@pytest.mark.parametrize(
    ("directive", "cure"),
    [
        ("--partition=x", "slurm.partition"),
        ("--partition x", "slurm.partition"),
        ("-px", "slurm.partition"),
        ("-N2", "resources.nodes"),
        ("--mem=5G", "resources.memory_per_node"),
        ("--output=x", "remove it"),
        ("--array=1-4", "remove it"),
        ("#SBATCH --time=1", "resources.walltime"),
        ("--switches=1 --mem=5G", "resources.memory_per_node"),
        ("--begin now -N2", "resources.nodes"),
        ("--clusters=east", "SLURM_CLUSTERS"),
        ("--nice=5 -Meast,west", "SLURM_CLUSTERS"),
        ("--parti=debug", "slurm.partition"),
        ("--part debug", "slurm.partition"),
        ("--gpus-per-n=4", "resources.gpus_per_node"),
        ("--wra=id", "remove it"),
        ("--clu=east", "SLURM_CLUSTERS"),
        ("-HN4", "resources.nodes"),
        ("-sN2", "resources.nodes"),
        ("-sHOp debug", "slurm.partition"),
        ("--nice=5 -sMeast", "SLURM_CLUSTERS"),
        ("--nice=1 '--pa'\"rt\"ition=x", "slurm.partition"),
        ("--nice=1 '--pa\\rtition=x'", "without it"),
    ],
)
def test_directives_that_pipectl_manages_are_refused(
    make_request: MakeRequest, directive: str, cure: str
) -> None:
    with pytest.raises(InvalidInputError, match=r"slurm\.directives") as caught:
        render_script(make_request(slurm=SlurmOptions(directives=(directive,))))
    assert cure in (caught.value.cure or "")


def test_options_that_the_site_refuses_are_not_written(make_request: MakeRequest) -> None:
    slurm = SlurmOptions(omit=("cpus-per-task", "time"), directives=("-t 10",))
    request = make_request(launcher="srun", slurm=slurm, more=(MoreNodes(1, 2),))
    script = render_script(request)
    assert "--nodes=1" in options(script)
    assert "-t 10" in options(script), "what is omitted is the user's to write"
    assert "--cpus-per-task" not in script
    assert "--time" not in script


@pytest.mark.parametrize("directive", ["mail-type=END", "", "--nice=1\ntouch x"])
def test_other_text_is_no_directive(make_request: MakeRequest, directive: str) -> None:
    with pytest.raises(InvalidInputError, match=r"slurm\.directives"):
        render_script(make_request(slurm=SlurmOptions(directives=(directive,))))


@pytest.mark.parametrize("key", ["partition", "account", "qos", "constraint", "reservation"])
def test_control_characters_in_options_are_refused(make_request: MakeRequest, key: str) -> None:
    with pytest.raises(InvalidInputError, match=rf"slurm\.{key}"):
        render_script(make_request(slurm=SlurmOptions(**{key: "a\nb"})))


def test_an_array_of_jobs_with_nodes_of_several_kinds_is_refused(
    make_request: MakeRequest, tmp_path: Path
) -> None:
    runs = Array((tmp_path / "0", tmp_path / "1"))
    request = make_request(more=(MoreNodes(1, 2),), array=runs)
    with pytest.raises(InvalidInputError, match="several kinds"):
        render_script(request)


@pytest.mark.parametrize("more", [(), (MoreNodes(1, 2),)])
@pytest.mark.parametrize("name", ["HYDRA_LAUNCHER", "HYDRA_LAUNCHER_EXEC", "HYDRA_BOOTSTRAP"])
def test_a_job_with_a_launcher_of_its_own_in_its_variables_gets_no_other(
    make_request: MakeRequest, more: tuple[MoreNodes, ...], name: str
) -> None:
    request = make_request(more=more, mpi="hydra", launcher="mpiexec")
    assert "HYDRA_LAUNCHER_EXEC=" in render_script(request)
    assert "HYDRA_" not in render_script(replace(request, variables={name: "ssh"})).replace(
        f"({name})", ""
    )
