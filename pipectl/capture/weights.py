"""Weights to start from: safetensors files, read one tensor at a time.

A checkpoint is one file, several with the ``model.safetensors.index.json`` of model hubs, or a
directory of either; the checkpoints of a run are such directories too.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from pipectl.capture.deferred import Deferred, settle
from pipectl.capture.step import in_model, own_name
from pipectl.capture.tensors import is_deferred
from pipectl.errors import CaptureError, DataFileError
from pipectl.spec import JobSpec
from pipectl.units import did_you_mean

_SHOWN = 4
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "C64": torch.complex64,
}


class Materializer:
    """Builds the model of a job as ``model.materialize`` says, and fills in its tensors.

    Args:
        spec: of the job.

    Raises:
        DataFileError: ``model.weights`` cannot be read.
    """

    def __init__(self, spec: JobSpec) -> None:
        per_rank = spec.model.materialize == "per_rank"
        self._deferred = Deferred(spec.training.seed) if per_rank else None
        self._weights = None if spec.weights_path is None else Weights(spec.weights_path)
        self._names: dict[str, list[str]] = {}

    def build(self, make: Callable[[], nn.Module]) -> nn.Module:
        """What ``make`` returns: the model, without memory if each rank makes its own part.

        Raises:
            CaptureError: ``make`` fails, perhaps because tensors have no values yet.
        """
        if self._deferred is None:
            return make()
        try:
            with self._deferred.recording():
                model = make()
        except CaptureError as error:
            raise CaptureError(
                f"{error.message}; with materialize: per_rank, tensors have no values until a "
                "rank needs them",
                cure="see whether it runs with materialize: eager (and a small model); if it does, "
                "let the factory use torch operators alone, and no .numpy() of a parameter",
            ) from error
        settle(self._deferred, model)
        return model

    def start(self, step: nn.Module, states: Mapping[str, Tensor], tied: Mapping[str, str]) -> None:
        """Check the weights to start from, and fill them into what has memory already.

        Args:
            step: the wrapper that holds the model.
            states: its parameters and buffers, tied ones once.
            tied: further names of tied ones, to their name in ``states``.

        Raises:
            DataFileError: the weights do not fit the model.
        """
        if self._weights is None:
            return
        self._names = {name: [own_name(name)] for name in states if in_model(name)}
        for further, name in tied.items():
            self._names.setdefault(name, [own_name(name)]).append(own_name(further))
        persistent = step.state_dict(keep_vars=True)
        self._weights.check(
            [(states[name], own, name in persistent) for name, own in self._names.items()]
        )
        for name, tensor in states.items():
            stored = self._weights.name_of(self._names.get(name, []))
            if stored is not None and not is_deferred(tensor):
                with torch.no_grad():
                    tensor.copy_(self._weights.load(stored, tensor))

    def make(self, name: str, tensor: Tensor) -> Tensor:
        """The values of a tensor without memory; a parameter stays one.

        Raises:
            CaptureError: neither the checkpoint nor the factory gives it values.
        """
        stored = self._weights.name_of(self._names.get(name, [])) if self._weights else None
        if self._weights is None or stored is None:
            assert self._deferred is not None
            return self._deferred.make(tensor, own_name(name))
        loaded = self._weights.load(stored, tensor)
        is_parameter = isinstance(tensor, nn.Parameter)
        return nn.Parameter(loaded, tensor.requires_grad) if is_parameter else loaded


class Weights:
    """The tensors of a checkpoint by name; only names, shapes and types are read at first.

    Args:
        path: of a file, an index, or a directory.

    Raises:
        DataFileError: there is no checkpoint, or a file of it is missing or damaged.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file_of: dict[str, Path] = {}
        self._types: dict[str, tuple[str, list[int]]] = {}
        for file in _files(path):
            self._read_header(file)

    def check(self, states: Sequence[tuple[Tensor, Sequence[str], bool]]) -> None:
        """Compare the checkpoint with a model.

        Args:
            states: the parameters and buffers of the model, each with all its names, of which the
                checkpoint may use any (tied parameters have several), and whether it must have it.

        Raises:
            DataFileError: listing names that are missing or too many, and wrong shapes and types.
        """
        known = {name for _, names, _ in states for name in names}
        lacking = [names[0] for _, names, needed in states if needed and not self.name_of(names)]
        unknown = [name for name in self._file_of if name not in known]
        problems = [f"has no {name!r}" for name in lacking]
        problems += [f"{n!r} is not in the model{did_you_mean(n, known)}" for n in unknown]
        for tensor, names, _ in states:
            problems += self._differences(names, tensor)
        if problems:
            more = len(problems) - _SHOWN
            listed = "; ".join(problems[:_SHOWN]) + (f"; and {more} more" if more > 0 else "")
            raise DataFileError(
                f"{self._path}: does not fit the model: {listed}",
                cure="use a checkpoint of this model: safetensors.torch.save_model(model, file)",
            )

    def load(self, name: str, like: Tensor) -> Tensor:
        """One tensor, on memory of its own, with the type and layout of ``like``."""
        target = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype)
        with _opened(self._file_of[name]) as file:
            return target.copy_(file.get_tensor(name))

    def name_of(self, names: Sequence[str]) -> str | None:
        """The first of several names that the checkpoint has."""
        return next((name for name in names if name in self._file_of), None)

    def _differences(self, names: Sequence[str], tensor: Tensor) -> Iterator[str]:
        name = self.name_of(names)
        if name is None:
            return
        kind, shape = self._types[name]
        if shape != list(tensor.shape):
            yield f"{name!r} has shape {shape}, not {list(tensor.shape)}"
        dtype, wide = _DTYPES.get(kind), tensor.dtype
        # Whether every value of the one is one of the other: bfloat16 of float32, say.
        if (
            dtype is None
            or wide.is_floating_point != dtype.is_floating_point
            or torch.promote_types(wide, dtype) != wide
        ):
            yield f"{name!r} is {kind}, which {wide} does not hold"

    def _read_header(self, file: Path) -> None:
        with _opened(file) as opened:
            for name in opened.keys():  # noqa: SIM118 (it is no mapping)
                if name in self._file_of:
                    raise DataFileError(
                        f"{self._path}: {name!r} is in {self._file_of[name].name} and {file.name}",
                        cure="name one file, or the index that lists the right ones",
                    )
                piece = opened.get_slice(name)
                self._file_of[name] = file
                self._types[name] = (piece.get_dtype(), list(piece.get_shape()))


def _files(path: Path) -> list[Path]:
    if not path.is_dir():
        return _indexed(path) if path.suffix == ".json" else [path]
    indexes = sorted(path.glob("*.safetensors.index.json"))
    files = _indexed(indexes[0]) if indexes else sorted(path.glob("*.safetensors"))
    if not files:
        raise DataFileError(
            f"{path}: holds no .safetensors file", cure="name the directory of a checkpoint"
        )
    return files


def _indexed(index: Path) -> list[Path]:
    try:
        listed = json.loads(index.read_text())["weight_map"].values()
        return [index.with_name(Path(name).name) for name in dict.fromkeys(listed)]
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise DataFileError(
            f"{index}: is no index of safetensors files: {type(error).__name__}: {error}",
            cure="name an index with a weight_map, or the directory of the files",
        ) from error


def _opened(file: Path) -> Any:
    try:
        return safe_open(file, framework="pt")
    except (OSError, SafetensorError) as error:
        raise DataFileError(
            f"{file}: cannot be read as safetensors: {error}",
            cure="name a safetensors file; torch.save files can be converted with save_model",
        ) from error
