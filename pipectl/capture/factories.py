"""Imports and calls what a spec names, with errors that name the user's line."""

from __future__ import annotations

import functools
import hashlib
import importlib
import importlib.util
import inspect
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from pipectl.errors import CaptureError, WorkerError, lacks_memory
from pipectl.faults import user_line
from pipectl.runs.sources import follow_imports
from pipectl.spec import references
from pipectl.spec.code import is_source
from pipectl.units import did_you_mean

_USER = "pipectl_user_"
"""Begins the names of modules that are imported from files."""
_KNOWN = {
    "does not have a deterministic implementation": (
        "set training.deterministic: false, or compute this by other operators"
    ),
    r"compiled with CUDA|(No|no) (CUDA|HIP)|NVIDIA driver|invalid device ordinal|same device": (
        "leave .cuda() and .to(device) out of the model, the loss and the data: pipectl moves them "
        "to the accelerators of the job (resources.gpus_per_node)"
    ),
    r"process group|init_process_group": "leave torch.distributed and DistributedDataParallel out: "
    "pipectl starts the ranks, divides batches and adds gradients",
    r"FileNotFoundError|No such file": "pass the path in the kwargs, where ./ is relative to the "
    "job file, or build it from Path(__file__).parent: ranks run in the run directory, so other "
    "relative paths mean something else there",
    r"must have the same dtype|expected scalar type|to have the same dtype": "give inputs the type "
    "of the model's weights in the dataset (x.float(), say: numpy makes float64), or convert them "
    "in the model",
    r"Target -?\d+ is out of bounds|index out of range in self": "classes and indices count from "
    "0, and must be less than the model's number of outputs or embeddings: check those of the data",
    r"'list' object has no attribute '(named_)?parameters'": "an optimizer's factory gets the "
    "list of parameters, as torch.optim:SGD does, not the model",
    r"empty parameter list": "each rank makes the optimizer for the parameters of its own stages, "
    "which may all be of one kind: leave out an optimizer or a group without parameters",
    r"Expected \d+ lr_lambdas|got \d+ (max_lr|lr_lambdas)|max_lr must be": "each rank makes the "
    "optimizer for the parameters of its own stages: let the factory make all groups, also those "
    "without parameters, or write them under optimizer.groups",
    r"SystemExit: 2$": "a module that reads the command line when it is imported cannot be a part "
    'of a job: put that below if __name__ == "__main__":',
}
"""What to do about errors of the user's code that many make, by words of them."""


def find(factory: str) -> Callable[..., Any]:
    """Return the callable that ``/home/me/file.py:name`` or ``package.module:name`` names.

    Raises:
        CaptureError: there is no such file, module or name, or its import fails.
    """
    reference = references.parse(factory)
    attribute = reference.attribute
    follow_imports()
    if reference.file is not None:
        module = _import_file(reference.file, factory)
    else:
        if reference.root is not None and str(reference.root) not in sys.path:
            sys.path.insert(0, str(reference.root))
        try:
            module = importlib.import_module(str(reference.module))
        except (Exception, SystemExit) as error:
            raise _import_failed(factory, error) from error
    target: Any = module
    for part in attribute.split("."):
        if not hasattr(target, part):
            raise CaptureError(
                f"{factory}: there is no {attribute!r}{did_you_mean(part, dir(target))}",
                hint="correct the name after the colon in the spec",
            )
        target = getattr(target, part)
    if not callable(target):
        raise CaptureError(
            f"{factory}: is a {type(target).__name__}, not a function or class",
            hint="name a function or a class",
        )
    return target  # type: ignore[no-any-return]


def known_hint(error: BaseException) -> str | None:
    """Return what to do about an error of the user's code, if many make it."""
    text = f"{type(error).__name__}: {error}"
    return next((hint for words, hint in _KNOWN.items() if re.search(words, text)), None)


def call(function: Callable[..., Any], name: str, /, *args: Any, **kwargs: Any) -> Any:
    """Call user code; an exception becomes an error that names file and line.

    Args:
        name: key of the job; for a factory, ``KEY.factory: `` and what the key says.

    Raises:
        CaptureError: the arguments do not fit, or the callable raises.
    """
    try:
        return function(*args, **kwargs)
    except CaptureError:  # of a callback of pipectl's own
        raise
    except (Exception, SystemExit) as error:
        place = user_line(error.__traceback__)
        _, is_factory, target = name.rpartition(".factory: ")
        what = f"call {target} in a Python shell with the kwargs of the job"
        shell = f"{what if is_factory else 'run it in a Python shell'} to see the whole error"
        raise CaptureError(
            f"{name}: raised {type(error).__name__}: {error}{place}{_mistyped(error, kwargs)}",
            hint=known_hint(error) or shell,
        ) from error


def _mistyped(error: BaseException, kwargs: Mapping[str, Any]) -> str:
    """Return which arguments have a type that a TypeError names, as a number in quotes has."""
    if not isinstance(error, TypeError):
        return ""
    types = set(re.findall(r"\b(str|list|dict|tuple|bool)\b", str(error)))
    found = [
        f"{key} is {value!r}" for key, value in kwargs.items() if type(value).__name__ in types
    ]
    return f" (where {', '.join(found)})" if found else ""


def call_in_training(function: Callable[..., Any], key: str, *args: Any) -> Any:
    """Call what a factory has made; an exception of it is one of training, not of an input.

    Raises:
        WorkerError: the callable raises; errors for lack of memory pass unchanged.
    """
    try:
        return call(function, key, *args)
    except CaptureError as error:
        cause = error.__cause__
        if cause is not None and lacks_memory(cause):
            raise cause from None
        raise WorkerError(error.message, hint=error.hint) from cause


def bind(function: Callable[..., Any], name: str, kwargs: Mapping[str, Any]) -> Any:
    """Return a loss or metric: an instance of a class, or a function with ``kwargs`` bound.

    Args:
        name: see :func:`call`.
    """
    if inspect.isclass(function):
        return call(function, name, **kwargs)
    return functools.partial(function, **kwargs) if kwargs else function


def module_of(user_class: type) -> str:
    """Return the module of a user's class; for a file, its name without the directory."""
    name = user_class.__module__
    if not name.startswith(_USER):
        return name
    return name.removeprefix(_USER).rpartition("_")[0]


def is_torch_code(filename: str) -> bool:
    """Return whether a file belongs to torch."""
    return filename.startswith(str(Path(torch.__file__).parent))


def _import_file(path: Path, factory: str) -> ModuleType:
    # The same name in every process: loader processes may unpickle objects of this module.
    digest = hashlib.blake2b(str(path).encode(), digest_size=6).hexdigest()
    name = f"{_USER}{path.stem}_{digest}"
    if name in sys.modules:
        return sys.modules[name]
    if not is_source(path):
        raise CaptureError(
            f"{factory}: no such file", hint="the path in the spec is relative to the spec file"
        )
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    if str(path.parent) not in sys.path:
        # A user's file may import its neighbours, as it could when run as a script.
        sys.path.insert(0, str(path.parent))
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise _import_failed(factory, error) from error
    return module


def _import_failed(factory: str, error: BaseException) -> CaptureError:
    place = user_line(error.__traceback__)
    if isinstance(error, SyntaxError):
        place = f" (at {error.filename}:{error.lineno})"
    if "attempted relative import" in str(error):
        return CaptureError(
            f"{factory}: cannot be imported: {error}{place}",
            hint="name the file as a module of its package: package.module:name, where the package "
            "is next to the job file (or DIRECTORY/package.module:name)",
        )
    return CaptureError(
        f"{factory}: cannot be imported: {type(error).__name__}: {error}{place}",
        hint=known_hint(error)
        or "correct the module, or install what it needs into this Python environment",
    )
