"""Initial weights: safetensors files, read one tensor at a time.

A checkpoint is one file, several files with the ``model.safetensors.index.json`` of model hubs, or
a directory of either; checkpoints of a run are such directories too.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from pipectl.capture.model_with_loss import in_model, own_name
from pipectl.capture.tensor_file import CODES, TensorReader
from pipectl.errors import DataFileError
from pipectl.units import did_you_mean, shorten

MAX_NAMED = 4
"""Problems that an error lists."""
_WITHOUT_PROMOTION = {
    *(torch.uint16, torch.uint32, torch.uint64),
    *(torch.float8_e4m3fn, torch.float8_e5m2),
}


class Weights:
    """The tensors of a checkpoint; only names, shapes and types are read at first.

    Args:
        path: of a file, an index, or a directory.

    Raises:
        DataFileError: there is no checkpoint, or a file of it is missing or damaged.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file_of: dict[str, Path] = {}
        self._stored: dict[str, str] = {}
        hint = "name a safetensors file; torch.save files can be converted with save_model"
        self._reader = TensorReader(hint)
        for file in _files(path):
            for name in self._reader.header(file).layouts:
                if name in self._file_of:
                    raise DataFileError(
                        f"{self._path}: {name!r} is in {self._file_of[name].name} and {file.name}",
                        hint="name one file, or the index that lists the right ones",
                    )
                self._file_of[name] = file

    @property
    def layouts(self) -> dict[str, Tensor]:
        """Shape and type of every tensor, on the meta device."""
        return {
            name: self._reader.header(file).layouts[name] for name, file in self._file_of.items()
        }

    def match(
        self, wrapper: nn.Module, states: Mapping[str, Tensor], tied: Mapping[str, str]
    ) -> None:
        """Find the tensors of a model; the checkpoint may use any name of a tied tensor.

        Args:
            wrapper: of the model.
            states: its parameters and buffers, tied ones once.
            tied: further names of tied ones, to their name in ``states``.

        Raises:
            DataFileError: lists missing and unknown names, and wrong shapes and types.
        """
        names = {name: [own_name(name)] for name in states if in_model(name)}
        for further, name in tied.items():
            names.setdefault(name, [own_name(name)]).append(own_name(further))
        persistent = {tied.get(name, name) for name in wrapper.state_dict(keep_vars=True)}
        lacking, wrong = list[str](), list[str]()
        for name, aliases in names.items():
            stored = next((each for each in aliases if each in self._file_of), None)
            if stored is not None:
                self._stored[name] = stored
                wrong += self._differences(stored, states[name])
            elif name in persistent:
                lacking.append(f"has no {aliases[0]!r}")
        all_names = {each for aliases in names.values() for each in aliases}
        unknown = [name for name in self._file_of if name not in all_names]
        strange = [f"{n!r} is not in the model{did_you_mean(n, all_names)}" for n in unknown]
        problems = [*lacking, *strange, *wrong]
        if problems:
            raise DataFileError(
                f"{self._path}: does not fit the model: {'; '.join(shorten(problems, MAX_NAMED))}",
                hint="use a checkpoint of this model: safetensors.torch.save_model(model, file)",
            )

    def load(self, name: str, like: Tensor) -> Tensor | None:
        """Return a tensor of the model, in memory of its own, with the type and layout of ``like``.

        None if the checkpoint does not have it.
        """
        stored = self._stored.get(name)
        if stored is None:
            return None
        target = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype)
        return target.copy_(self._reader.tensor(self._file_of[stored], stored))

    def _differences(self, name: str, tensor: Tensor) -> Iterator[str]:
        stored = self._reader.header(self._file_of[name]).layouts[name]
        if stored.shape != tensor.shape:
            yield f"{name!r} has shape {list(stored.shape)}, not {list(tensor.shape)}"
        if not _holds(tensor.dtype, stored.dtype):
            yield f"{name!r} is {CODES[stored.dtype]}, which {tensor.dtype} does not hold"


def _holds(wide: torch.dtype, dtype: torch.dtype) -> bool:
    """Return whether every value of the second type is one of the first."""
    if wide == dtype:
        return True
    if wide.is_floating_point != dtype.is_floating_point or {wide, dtype} & _WITHOUT_PROMOTION:
        return False
    return torch.promote_types(wide, dtype) == wide


def _files(path: Path) -> list[Path]:
    if not path.is_dir():
        return _indexed(path) if path.suffix == ".json" else [path]
    indexes = sorted(path.glob("*.safetensors.index.json"))
    files = _indexed(indexes[0]) if indexes else sorted(path.glob("*.safetensors"))
    if not files:
        raise DataFileError(
            f"{path}: contains no .safetensors file", hint="name the directory of a checkpoint"
        )
    return files


def _indexed(index: Path) -> list[Path]:
    try:
        listed = json.loads(index.read_text())["weight_map"].values()
        return [index.with_name(Path(name).name) for name in dict.fromkeys(listed)]
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise DataFileError(
            f"{index}: is not an index of safetensors files: {type(error).__name__}: {error}",
            hint="name an index with a weight_map, or the directory of the files",
        ) from error
