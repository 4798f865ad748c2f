"""What a job was submitted with besides its code: Python, packages, and the state of git.

git is asked only about directories that nobody else can write to, because it runs programs that
the configuration of a repository names.
"""

from __future__ import annotations

import os
import platform
import socket
import sys
from importlib.metadata import distributions
from pathlib import Path
from typing import TYPE_CHECKING

from pipectl.batch import get_scheduler, process
from pipectl.errors import PipectlError
from pipectl.files import fault_of_owner
from pipectl.runs.kept_code import Repository
from pipectl.units import printable

if TYPE_CHECKING:
    from pipectl.jobs.job import Job

_GIT_TIMEOUT_S = 5.0
_GIT = ("git", "--no-optional-locks", "-c", "core.fsmonitor=false")
_MAX_CHANGED = 100
"""Maximum number of changed files that are listed."""


def find_repository(directory: Path | None) -> tuple[Repository | None, str]:
    """The git repository that contains a directory of user code, or why there is none."""
    if directory is None:
        return None, "the job has no code of its own"
    try:
        top = _git(directory, "rev-parse", "--show-toplevel")
        for place in (Path(top), Path(top, ".git")):
            if fault := fault_of_owner(place, groups=False):
                return None, f"{place} {fault}, so git was not asked"
        head = process.run(
            [*_GIT, "-C", top, "rev-parse", "--verify", "--quiet", "HEAD"],
            hint="", timeout_s=_GIT_TIMEOUT_S,
        )  # fmt: skip
        entries = _git(
            top, "status", "--porcelain", "-z", "--untracked-files=normal", "--no-renames"
        )
    except (PipectlError, OSError) as error:
        return None, printable(str(error).splitlines()[0] if str(error) else "git failed")
    changed = [entry[3:] for entry in entries.split("\0") if entry[3:]]
    commit = head.stdout if head.returncode == 0 else None
    return Repository(top, commit, tuple(changed[:_MAX_CHANGED])), ""


def _git(directory: Path | str, *arguments: str) -> str:
    done = process.run([*_GIT, "-C", str(directory), *arguments], hint="", timeout_s=_GIT_TIMEOUT_S)
    if done.returncode:
        raise OSError(done.message.splitlines()[0])
    return done.stdout


def describe_environment(repository: Repository | None, why: str) -> str:
    """``environment.txt``.

    Args:
        why: why there is no repository.
    """
    lines = [
        f"host: {socket.gethostname()}",
        f"python: {platform.python_version()} ({sys.executable})",
        f"platform: {platform.platform()}",
    ]
    if modules := os.environ.get("LOADEDMODULES"):
        lines.append(f"modules: {modules}")
    if repository is None:
        lines.append(f"git: {why}")
    else:
        lines.append(f"git: {repository.directory}")
        lines.append(f"commit: {repository.commit or 'none yet'}")
        lines.append(f"changed since the commit: {', '.join(repository.changed) or 'nothing'}")
    packages = {f"{each.name}=={each.version}" for each in distributions() if each.name}
    lines += ["", *sorted(packages, key=str.lower)]
    return "".join(f"{printable(line)}\n" for line in lines)


def note_of_modules(job: Job) -> str:
    """Say that the modules of this shell are not those of a job, if the job may need them for its
    MPI; empty if not."""
    modules, environment = os.environ.get("LOADEDMODULES"), job.spec.environment
    is_own = environment.modules or environment.setup or environment.container
    has_mpi = job.workload.single_process or Path(sys.executable).with_name("mpiexec").exists()
    if not modules or is_own or has_mpi or environment.inherit == "all":
        return ""
    if get_scheduler(job.scheduler).runs_in_shell:
        return ""
    return (
        f"the job begins as a login does, without what this shell has loaded: "
        f"{printable(modules.replace(':', ', '))}; environment.modules loads them in the job"
    )
