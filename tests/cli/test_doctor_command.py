"""What `doctor` finds, with programs that misbehave in the ways that real ones do."""

import json
import os
import shutil
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from pipectl.batch import launchers
from pipectl.batch.findings import Finding
from pipectl.cli import main
from pipectl.cli.commands import doctor, status
from pipectl.cli.commands.doctor import examine
from pipectl.spec import load
from pipectl.versions import hint_of_torch

HERE = Path()


def of(what: str, findings: Any) -> Finding:
    return next(each for each in findings if each.what == what)


def answer(**found: Any) -> str:
    """Of an mpiexec of Intel's."""
    version = "[[ $1 == --version ]] && echo 'Intel(R) MPI Library for Linux* OS' && exit"
    return f"{version}; echo 'Welcome to the site'; echo '{json.dumps(found)}'"


SOUND = {"ranks": 2, "library": "MPICH 5", "threads": "multiple",
         "latency_s": 2e-6, "bandwidth_bytes_per_s": 2**31}  # fmt: skip


RULE = "-" * 74
AS_ROOT = f"""{RULE}
mpiexec has detected an attempt to run as root.

Running as root is *strongly* discouraged as any mistake (e.g., in
defining TMPDIR) or bug can result in catastrophic damage to the OS
file system, leaving your system in an unusable state.

We strongly suggest that you run mpiexec as a non-root user.
{RULE}
"""
"""As Open MPI 4 prints it."""
MPIS = {
    "sound": answer(**SOUND),
    "another library": answer(ranks=1, library="Open MPI v5"),
    "unknown launcher": answer(**SOUND).replace("Intel(R)", "Our"),
    "few threads": answer(**SOUND | {"threads": "serialized"}),
    "an error": "echo 'no such plugin' >&2; exit 3",
    "root": f"cat >&2 <<'END'\n{AS_ROOT}END\nexit 1",
    "a rank": f"printf 'ImportError: libmpi.so\\n{RULE}\\nA rank\\n{RULE}\\n' >&2; exit 1",
    "other words": "echo hello",
    "no words": "true",
}
SINFOS = {
    "sound": '[[ $1 == --version ]] && echo "slurm 22.05.8" || printf "debug*\\ngpu\\n"',
    "down": "echo 'slurm_load_partitions: Unable to contact slurm controller' >&2; exit 1",
}
QSTATS = {
    "down": "[[ $1 == --version ]] && echo 'pbs_version = 23.06.06'",
    "jobs may submit jobs": r"printf 'Server: pbs1\n    flatuid = True\n    pbs_version = 23\n'",
    "they may not": r"printf 'Server: pbs1\n    flatuid = False\n'",
    "nobody knows": r"printf 'Server: pbs1\n'",
    "nothing is said": "true",
    "Torque": r"printf 'Version: 6.1.2\nCommit: 661e0925\n' >&2",
    "Grid Engine": r"echo 'error: Unknown option --version' >&2; exit 1",
}


def test_what_is_found_and_what_to_do(mpiexec, program, job, golden):
    texts = []

    def show(what, part, spec=None):
        found = examine(HERE, spec, part)
        lines = (f"{each.level} {each.what}: {each.text} ({each.hint})" for each in found)
        texts.append("\n".join([f"# {part}: {what}", *lines, ""]).replace(f"{Path.cwd()}/", ""))

    for part in ("MPI", "batch system"):
        show("not installed", part)
    for what, text in MPIS.items():
        mpiexec(text)
        show(what, "MPI")
    for name in ("qsub", "qselect"):
        program(name, "true")
    for what, text in QSTATS.items():
        program("qstat", text)
        show(f"PBS: {what}", "batch system")
    program("sbatch", "true")
    program("srun", 'printf "MPI plugin types are...\\n\\tpmi2\\n\\tnone\\n\\tpmix_v4\\n" >&2')
    for what, text in SINFOS.items():
        program("sinfo", text)
        show(f"Slurm: {what}", "batch system")
    program("sinfo", SINFOS["sound"])
    for mpi in ("pmix", "none", "openmpi"):
        spec = load(job, [f"launch={{launcher: srun, mpi: {mpi}}}"])
        show(f"launch.mpi: {mpi}", "batch system", spec)
    golden(*texts)


def test_the_environment_variables_of_a_job_are_those_of_the_tests(job, capsys):
    """So that what doctor advises can be tried, and what no rank could load is found; it names what
    it does not test."""
    library = "environment.variables.MPI4PY_LIBMPI=/nonexistent.so"
    found = [*examine(HERE, load(job, [library]), "MPI")]
    assert [each.level for each in found] == ["fail"]
    assert "MPI4PY_LIBMPI" not in os.environ
    assert not [*examine(HERE, load(job), "environment")]
    setup = ["environment.setup=[true]", "environment.container={image: a.sif, runtime: apptainer}"]
    (named,) = examine(HERE, load(job, setup), "environment")
    assert "environment.setup and environment.container of the job: not used" in named.text


def test_an_mpi_that_hangs(mpiexec, monkeypatch):
    monkeypatch.setattr(doctor, "_PATIENCE_S", 0.5)
    monkeypatch.setattr(launchers, "_TIMEOUT_S", 0.5)
    mpiexec("exec sleep 60")
    (found,) = examine(HERE, only="MPI")
    assert (found.level, "no answer" in found.text) == ("fail", True)


def test_the_file_system(tmp_path, monkeypatch):
    found = list(examine(tmp_path / "not" / "yet", only="files"))
    assert {each.what: each.level for each in found} == {"files": "ok", "clock": "ok"}
    assert [*tmp_path.iterdir()] == []
    monkeypatch.setattr(doctor, "_MIN_FREE_BYTES", 1 << 60)
    monkeypatch.setattr(doctor, "_MAX_SKEW_S", -1.0)
    monkeypatch.setattr("fcntl.flock", lambda *_: None)
    found = list(examine(tmp_path, only="files"))
    assert {each.what for each in found if each.level == "warn"} == {
        "files", "locks", "clock",
    }  # fmt: skip


FAULTS = {
    "ModuleNotFoundError: No module named 'torch'": "pip install torch; tested are torch 2.8",
    "ModuleNotFoundError: No module named 'sympy'": "pip install sympy, or install torch again",
    "ImportError: libcuda.so.1: cannot open shared object file: No such file": "a node with GPUs",
    "ImportError: libcudart.so.12: cannot open shared object file: No such file": "LD_LIBRARY_PATH",
    "OSError: libmkl_core.so.2: cannot open shared object file: No such file": "LD_LIBRARY_PATH",
    "ValueError: libcublas.so.*[0-9] not found in the system path ['/a']": "LD_LIBRARY_PATH",
    "ImportError: /lib64/libc.so.6: version `GLIBC_2.28' not found (by x.so)": "newer system",
    "ImportError: libstdc++.so.6: version `GLIBCXX_3.4.29' not found": "before the one that torch",
    "ImportError: x/libtorch_cuda.so: undefined symbol: ncclCommRegister": "loaded modules",
    "RuntimeError: what nobody knows": "shows the whole error",
}
"""What torch's import fails with, and a part of the hint."""
SOME = "ImportError: libcudart.so.12: cannot open shared object file: No such file"
BROKEN = {
    f"raise ImportError({SOME.partition(': ')[2]!r})": (SOME, FAULTS[SOME]),
    "import os; os.kill(os.getpid(), 4)": ("ended by SIGILL", "another processor"),
    "import sys; sys.exit(1)": ("exit code 1", "shows the whole error"),
}


def test_what_helps_if_torch_cannot_be_imported(cli, monkeypatch):
    for fault, hint in FAULTS.items():
        assert hint in hint_of_torch(fault), fault
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.setattr(status, "get_statuses", lambda *_: import_module("torch"))
    result = cli("status")
    assert (result.code, "torch cannot be imported" in result.err) == (1, True)


def test_a_torch_that_is_broken_or_untested(monkeypatch):
    for code, (text, hint) in BROKEN.items():
        monkeypatch.setattr(doctor, "_TORCH", code)
        (found,) = examine(HERE, only="torch")
        assert found.level == "fail"
        assert found.text.startswith(f"cannot be imported by {sys.executable}: ")
        assert found.text.endswith(text)
        assert hint in found.hint
    monkeypatch.setattr("importlib.metadata.version", lambda _: "2.99.0")
    monkeypatch.setattr(doctor, "_TORCH", """print('["2.99.0", null, 0, null]')""")
    first = next(examine(HERE, only="torch"))
    assert (first.what, first.level) == ("torch", "warn")
    assert first.text.startswith("tested with torch 2.8 to ")
    assert "this is 2.99.0" in first.text


@pytest.mark.parametrize(("kind", "built"), [("cuda", "CUDA"), ("ROCm", "ROCm"), ("xpu", "XPU")])
def test_a_torch_for_accelerators_on_a_machine_without_one(monkeypatch, kind, built):
    found = json.dumps(["2.13.0", "cuda" if kind == "ROCm" else kind, 0, kind])
    monkeypatch.setattr(doctor, "_TORCH", f"print({found!r})")
    text = of("accelerators", examine(HERE, only="torch")).text
    assert text.startswith(f"torch is built for {built}, but it finds no GPU on this machine")
    assert "of kind" not in text


@pytest.mark.mpi
def test_this_machine(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    found = list(examine(Path("runs")))
    assert of("MPI", found).level == "ok"
    assert "takes the options of" in of("launcher", found).text
    assert "GiB/s" in of("messages", found).text or "MiB/s" in of("messages", found).text
    if shutil.which("sbatch"):
        return  # installed, perhaps not set up
    assert main(["doctor", "--json"]) == 0
    assert {line["level"] for line in json.loads(capsys.readouterr().out)} <= {"ok", "warn"}
