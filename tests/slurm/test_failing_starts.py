"""Starts that fail, on a real Slurm: each ends soon, and says why in the words of its launcher."""

import shutil
import sys
import time
from pathlib import Path

import pytest

from pipectl.batch.slurm import SlurmScheduler
from pipectl.runs import RunDirectory, read_errors
from pipectl.spec.launch import Container
from tests.batch.job_requests import change, make_request, write_script

LIMIT_S = 60.0
EXPIRED = "srun: error: Task launch for StepId=1.0 failed on node node2: Job credential expired"
BINDING = "srun: error: CPU binding outside of job step allocation, allocated CPUs are: 0x3."
BUSY = "srun: Job step creation temporarily disabled, retrying (Requested nodes are busy)"
SLOTS = "There are not enough slots available in the system to satisfy the 2 slots"
PALS = "mpiexec: error: node2: launch failed: exec of ranks was refused"
PYTHON = (sys.executable, "-S", "-m", "mpi4py")
SECOND_FAILS = (
    "bash",
    "-c",
    "[[ $SLURMD_NODENAME == node1 ]] && exec sleep 300; echo denied; exit 3",
)
SECOND_ENDS = ("bash", "-c", "[[ $SLURMD_NODENAME == node1 ]] && exec sleep 300; exit 0")
SECOND_PROXY = (
    "/usr/bin/srun $1 -N2 -n2 bash -c "
    "'[[ $SLURMD_NODENAME == node1 ]] && exec sleep 300; echo denied >&2; exit 1'"
)
WAITS = ("bash", "-c", "exec sleep 300")


def prints(line, then="exit 1"):
    return f"echo '{line}' >&2; {then}"


# Of every start: what the job changes, and what is said. With ``srun`` that command is a script,
# with ``mpiexec`` the launcher is; ``soon`` is a job that allows little time for a silent start.
SIF = Container(image="/image.sif", runtime="apptainer")
HYDRA, SRUN = {"mpi": "hydra"}, {"launcher": "srun", "mpi": "pmi2"}
SOON = {"hang_after": 1}
STARTS = {
    "credential": (HYDRA, {"srun": prints(EXPIRED)}, EXPIRED),
    "binding": (HYDRA, {"srun": prints(BINDING)}, BINDING),
    "step refused": ({**HYDRA, "setup": ("export SLURM_JOB_ID=99999",)}, {}, "Invalid job id"),
    "no srun": (HYDRA, {"srun": None}, "srun"),
    "step waits": ({**HYDRA, **SOON}, {"srun": prints(BUSY, "exec sleep 300")}, BUSY),
    "agent waits": ({**HYDRA, **SOON}, {"srun": "exec sleep 300"}, "no rank has begun in"),
    "no proxy": (HYDRA, {"srun": 'exec /usr/bin/srun -N2 -n2 /no/such/proxy'}, "No such file"),
    "proxy dies": (HYDRA, {"srun": prints("proxy: killed", "kill -9 $$")}, "proxy: killed"),
    "no program": ({**HYDRA, "command": ("no-such-program",)}, {}, "no-such-program"),
    "second node": ({**HYDRA, "command": SECOND_FAILS}, {}, "denied"),
    "second ends": ({**HYDRA, "command": SECOND_ENDS}, {}, "a process ended on node"),
    "second proxy": (HYDRA, {"srun": SECOND_PROXY}, "denied"),
    "ranks wait": ({**HYDRA, **SOON, "command": WAITS}, {}, "no rank has begun in"),
    "no mpi4py": ({**HYDRA, "command": PYTHON}, {}, "No module named mpi4py"),
    "no mpiexec": ({"mpiexec": "/no/such/mpiexec"}, {}, "/no/such/mpiexec"),
    "no container": ({**HYDRA, "container": SIF, "python": "python"}, {}, "apptainer"),
    "srun credential": (SRUN, {"srun": prints(EXPIRED)}, EXPIRED),
    "srun refused": ({**SRUN, "setup": ("export SLURM_JOB_ID=99999",)}, {}, "Invalid job id"),
    "srun plugin": ({**SRUN, "mpi": "nosuch"}, {}, "mpi/nosuch"),
    "srun option": ({**SRUN, "args": ("--nosuch",)}, {}, "--nosuch"),
    "srun nodes": ({**SRUN, "args": ("--nodelist=node9",)}, {}, "not available"),
    "srun program": ({**SRUN, "command": ("no-such-program",)}, {}, "No such file"),
    "srun second": ({**SRUN, "command": SECOND_FAILS}, {}, "denied"),
    "srun waits": ({**SRUN, **SOON, "command": WAITS}, {}, "no rank has begun in"),
    "openmpi slots": ({"mpi": "openmpi"}, {"mpiexec": prints(SLOTS)}, SLOTS),
    "pals": ({"mpi": "cray"}, {"mpiexec": prints(PALS)}, PALS),
    "pals waits": ({"mpi": "cray", **SOON}, {"mpiexec": prints(PALS, "exec sleep 300")}, PALS),
}  # fmt: skip


@pytest.fixture
def submit(lab, tmp_path, mpiexec):
    """``submit(name, changes, programs)``: a job on two nodes; its run, and its id."""

    def start(name, changes, programs):
        directory = tmp_path / name
        request = make_request(directory, tag=name, nodes=2, tasks_per_node=1, walltime=300)
        request = change(request, mpiexec=mpiexec, slurm={"options": {"overcommit": True}})
        folder = directory / "bin"
        folder.mkdir(parents=True)
        for program, text in programs.items():
            interpreter = "/no/such/bash" if text is None else "/bin/bash"
            (folder / program).write_text(f"#!{interpreter}\n{text}\n")
            (folder / program).chmod(0o755)
        if "mpiexec" in programs:
            request = change(request, mpiexec=str(folder / "mpiexec"))
        setup = (f"export PATH='{folder}':$PATH", *changes.get("setup", ()))
        request = change(request, **{**changes, "setup": setup})
        script = write_script(request, scheduler="slurm")
        return RunDirectory(directory), SlurmScheduler().submit(script, request)

    return start


@pytest.mark.mpi
@pytest.mark.torture
def test_every_start_that_fails_ends_soon_and_says_why(submit):
    assert shutil.which("srun") == "/usr/bin/srun"
    runs = {name: submit(name, *start[:2]) for name, start in STARTS.items()}
    scheduler, began, ended = SlurmScheduler(), {}, {}
    while len(ended) < len(runs):
        now, found = time.time(), scheduler.query([job for _, job in runs.values()])
        for name, (_, job) in runs.items():
            state = found[job].state
            if not state.waits:
                began.setdefault(name, now)
            if state.final and name not in ended:
                ended[name] = now - began[name]
            assert name in ended or now - began.get(name, now) < LIMIT_S, (name, state)
        time.sleep(0.5)
    print({name: round(seconds) for name, seconds in ended.items()})
    wrong = {}
    for name, (run, _) in runs.items():
        errors, words = read_errors(run.start), STARTS[name][2]
        node = Path(errors[0].host).name if errors else ""
        if len(errors) != 1 or words not in errors[0].message or not node.startswith("node"):
            wrong[name] = (words, errors, run.job_log.read_text()[-1500:])
    assert not wrong
