"""How the processes of a job are started in its container.

Most runtimes are programs that run a command; Pyxis and CSCS's Container Engine are options of
srun, which starts ranks and single processes in the container. Sources: the manuals of Apptainer,
Shifter and podman-run(1), podman-hpc's site modules, ``srun --help`` with Pyxis, and CSCS's
reference of environment definition files.
"""

from __future__ import annotations

import json
import re
import shutil
from typing import TYPE_CHECKING, NamedTuple

from pipectl.batch import process
from pipectl.errors import InvalidInputError, SchedulerError

if TYPE_CHECKING:
    from pipectl.batch.request import JobRequest
    from pipectl.spec.launch import Container

AUTO = "auto"
_VARIABLES = "variables.sh"
_TIMEOUT_S = 20.0
_PASSED_ON = (
    "PIPECTL_*", "OMP_*", "MKL_*", "PYTHON*", "GLIBC_TUNABLES", "CUDA_VISIBLE_DEVICES", "SLURM_*",
    "PBS_*", "PALS_*", "FLUX_*", "PMI*", "OMPI_*", "MPI_LOCAL*",
)  # fmt: skip
"""Variables of the script and of launchers, for runtimes that pass none on."""
_WITH_VARIABLES = '. "$0" && exec "$@"'


class _Runtime(NamedTuple):
    """How a runtime is told what to run.

    Args:
        words: its program with its first words; the options of srun if it has no program. The
            run directory takes the place of ``{run}``.
        image: the word of the image, which is the last one.
        mount: the option for a directory; empty if directories are not options.
        separator: what stands between directories in one option; empty for an option each.
        ends: characters that end the name of a directory, or stand for something else.
        gpus: options for accelerators.
        sees_files: whether a container sees all shared file systems.
    """

    words: str
    image: str = "{image}"
    mount: str = ""
    separator: str = ""
    ends: str = ",:"
    gpus: tuple[str, ...] = ()
    sees_files: bool = False


_RUNTIMES = {
    "apptainer": _Runtime("apptainer exec", mount="--bind={}", gpus=("--nv",)),
    "singularity": _Runtime("singularity exec", mount="--bind={}", gpus=("--nv",)),
    # MPI needs the shared memory and the process numbers of the node.
    "podman-hpc": _Runtime(
        "podman-hpc run --rm --ipc=host --network=host --pid=host --workdir={run} "
        + " ".join(f"--env={name}" for name in _PASSED_ON),
        mount="--volume={}",
        gpus=("--gpu",),
    ),
    "shifter": _Runtime(
        "shifter",
        image="--image={image}",
        mount="--volume={}",
        separator=";",
        ends=",:;",
        sees_files=True,
    ),
    "pyxis": _Runtime(
        "--container-workdir={run}",
        image="--container-image={image}",
        mount="--container-mounts={}",
        separator=",",
    ),
    "cscs": _Runtime("", image="--environment={run}/container.toml", ends=":$"),
}
RUNTIMES = tuple(_RUNTIMES)
_OF_SRUN = {"pyxis": "--container-image", "cscs": "--environment"}
"""The options of srun that show that a runtime without a program is there."""
_BY_NAME = {
    r".*\.toml": ("cscs",),
    r".*\.s(quash)?fs|.*\.sqsh|[^/]*#.*": ("pyxis",),
    r"\w[\w+.-]*://.*|[/.].*|.*\.(sif|simg|img)": ("apptainer", "singularity"),
}
"""Runtimes by patterns of the images that they are usually given; others take the rest."""


def choose_runtime(container: Container) -> Container:
    """Return a container whose runtime is chosen by its image, and by what this machine has; it
    stays ``auto`` if none or several may be meant."""
    if container.runtime != AUTO:
        return container
    patterns = (names for text, names in _BY_NAME.items() if re.fullmatch(text, container.image))
    likely = next(patterns, ("podman-hpc", "shifter", *_OF_SRUN))
    found = [name for name in likely if _is_here(name)]
    if likely[0] in {"apptainer", "cscs", "pyxis"}:
        chosen = found[0] if found else likely[0]
    else:
        chosen = found[0] if len(found) == 1 else AUTO
    return container.model_copy(update={"runtime": chosen})


def _is_here(name: str) -> bool:
    """Return whether a runtime is found on this machine."""
    if name not in _OF_SRUN:
        return shutil.which(name) is not None
    try:
        done = process.run(["srun", "--help"], hint="", timeout_s=_TIMEOUT_S)
    except SchedulerError:
        return False
    return f"{_OF_SRUN[name]}=" in done.stdout + done.stderr


def wrap(request: JobRequest, command: tuple[str, ...], scheduler: str) -> tuple[str, ...]:
    """Return the command of a single process of a job, in the job's container if it has one.

    Raises:
        InvalidInputError: see :func:`rank_words`.
    """
    options, words = rank_words(request, command, scheduler)
    if not options:
        return words
    resources = request.resources
    cores = resources.tasks_per_node * resources.cpus_per_task
    one = ("--nodes=1", "--ntasks=1", f"--cpus-per-task={cores}", "--export=ALL")
    return ("srun", *one, *options, *words)


def rank_words(
    request: JobRequest, command: tuple[str, ...], scheduler: str
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the options of srun for the container of a job, and the command of its ranks.

    In a container, a command runs with the container's Python. ``environment.variables`` are set
    there, too: an image may have others.

    Raises:
        InvalidInputError: the runtime is not known or cannot be used here, or a directory cannot be
            mounted.
    """
    container = request.environment.container
    if container is None:
        return (), command
    name = _check(request, container, scheduler)
    runtime = _RUNTIMES[name]
    values = {"run": str(request.run_directory), "image": container.image}
    words = (*(_fill(word, values) for word in runtime.words.split()), *_mounts(request, container))
    if request.resources.gpus_per_node:
        words += runtime.gpus
    words += (*container.args, _fill(runtime.image, values))
    inner = ("python3" if command[0] == request.python else command[0], *command[1:])
    if request.environment.variables:
        file = str(request.run_directory / _VARIABLES)
        inner = ("/bin/sh", "-c", _WITH_VARIABLES, file, *inner)
    return (words, inner) if container.by_srun else ((), words + inner)


def _check(request: JobRequest, container: Container, scheduler: str) -> str:
    """Return the name of the runtime; raise an error if it is not known, or cannot start ranks."""
    name, launcher = container.runtime, request.launch.launcher
    if name == AUTO:
        raise InvalidInputError(
            f"environment.container: which runtime opens {container.image!r} cannot be told here",
            hint=f"set environment.container.runtime to one of {', '.join(RUNTIMES)}",
        )
    if container.by_srun and (scheduler != "slurm" or launcher not in {AUTO, "srun"}):
        other = f"--scheduler {scheduler}"
        if scheduler == "slurm":
            other = f"launch.launcher: {launcher}"
        raise InvalidInputError(
            f"environment.container.runtime: {name} is started by srun in a job of Slurm, not with "
            f"{other}",
            hint="remove it, or choose another runtime, such as apptainer",
        )
    return name


def _mounts(request: JobRequest, container: Container) -> tuple[str, ...]:
    """Return the options that mount directories."""
    runtime = _RUNTIMES[container.runtime]
    texts = _directories(request, container)
    if not runtime.mount or not texts:
        return ()
    if runtime.separator:
        texts = [runtime.separator.join(texts)]
    return tuple(runtime.mount.replace("{}", text) for text in texts)


def _directories(request: JobRequest, container: Container) -> list[str]:
    """Return what a container sees of this machine, as ``SOURCE:TARGET``.

    Raises:
        InvalidInputError: the runtime would read a name in another way.
    """
    runtime = _RUNTIMES[container.runtime]
    own = [] if runtime.sees_files else [str(path) for path in request.binds]
    for path in (*own, *(part for text in container.mounts for part in text.split(":"))):
        if found := next((letter for letter in path if letter in runtime.ends), None):
            raise InvalidInputError(
                f"environment.container: {path} contains {found!r}, which {container.runtime} does "
                "not take as part of a name",
                hint="choose a directory without one",
            )
    texts = [f"{path}:{path}" for path in own]
    texts += [text if ":" in text else f"{text}:{text}" for text in container.mounts]
    return list(dict.fromkeys(texts))


def _fill(word: str, values: dict[str, str]) -> str:
    """Return a word with values in place of their names; values may contain braces."""
    return re.sub(r"\{(run|image)\}", lambda match: values[match[1]], word)


def edf_of(request: JobRequest) -> str:
    """Return the text of ``container.toml``, the environment definition file of a job for CSCS's
    Container Engine; empty for other runtimes.

    It adds the directories to the user's file, or to an image. A JSON text is one of TOML, too.
    """
    container = request.environment.container
    if container is None or container.runtime != "cscs":
        return ""
    is_file = container.image.endswith(".toml") or re.fullmatch(r"[\w.-]+", container.image)
    values = {
        "base_environment" if is_file else "image": container.image,
        "workdir": str(request.run_directory),
        "mounts": _directories(request, container),
    }
    return "".join(
        f"{name} = {json.dumps(value, ensure_ascii=False)}\n" for name, value in values.items()
    )
