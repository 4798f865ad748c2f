"""Weights of a checkpoint in the formats of other programs. One tensor is in memory at a time."""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from torch import Tensor

from pipectl.capture.tensor_file import write_tensors
from pipectl.capture.weights import MAX_NAMED, Weights
from pipectl.errors import DataFileError, UsageError
from pipectl.files import make_directory, write_text
from pipectl.runtime.checkpoint.stored import Stored, StoredLoss
from pipectl.units import did_you_mean, shorten

FILE = "model.safetensors"
INDEX = "model.safetensors.index.json"
_METADATA = {"format": "pt"}
_MODE = 0o2777
"""Access of user, group and others to a directory, and whether files in it get its group."""
_COPIED = frozenset({".jinja", ".json", ".model", ".py", ".tiktoken", ".txt"})
"""Suffixes of the files beside the weights that describe a model and its tokenizer."""


class Renamed(Mapping[str, Tensor]):
    """The weights of a checkpoint with the names and types of other files of the model.

    A prefix, such as the name of the attribute that holds the model, may precede all names on
    either side.

    Args:
        like: a safetensors file, an index, or a directory of these.

    Raises:
        DataFileError: a file cannot be read, or names or shapes differ.
    """

    def __init__(self, weights: Stored, like: Path) -> None:
        self._weights = weights
        self._layouts = Weights(like).layouts
        self._names = _counterparts(set(weights), self._layouts)
        self._check(like)

    def __iter__(self) -> Iterator[str]:
        return iter(self._layouts)

    def __len__(self) -> int:
        return len(self._layouts)

    def __getitem__(self, name: str) -> Tensor:
        return self._weights[self._names[name]].to(self._layouts[name].dtype)

    def layout(self, name: str) -> Tensor:
        """Shape and type of a weight, on the meta device."""
        return self._layouts[name]

    def _check(self, like: Path) -> None:
        aliases = self._weights.manifest.aliases
        taken = {aliases.get(name, name) for name in self._names.values()}
        problems = [
            f"the run has no {name!r}{did_you_mean(name, set(self._weights))}"
            for name in self._layouts.keys() - self._names.keys()
        ]
        for name, own in self._names.items():
            there, here = list(self.layout(name).shape), list(self._weights.layout(own).shape)
            if there != here:
                problems.append(f"{name!r} has shape {there}, and {here} in the run")
        problems += [
            f"{name!r} of the run is not there"
            for name in self._weights
            if aliases.get(name, name) not in taken
        ]
        if problems:
            listed = "; ".join(shorten(sorted(problems), MAX_NAMED))
            raise DataFileError(
                f"{like}: does not match the model of the run: {listed}",
                hint="name the files that the model of the run was made from, or leave out --like",
            )


Source = Stored | StoredLoss | Renamed
"""Weights by name, each read when it is accessed."""


def loss_file(path: Path, *, is_directory: bool) -> Path:
    """The file of the loss's own weights: beside that of the model, or in a folder of its own.

    Programs that read a directory of weights would take it for one of them.
    """
    if is_directory:
        return path / "loss" / FILE
    return path.with_name(f"{path.name.removesuffix('.safetensors')}-loss.safetensors")


def _counterparts(own: Collection[str], others: Collection[str]) -> dict[str, str]:
    """The checkpoint's name for each other name, with the prefix under which most names match."""
    probe = max(others, key=len, default="")
    prefixes = {("", "")}
    for name in own:
        if name.endswith(f".{probe}"):
            prefixes.add((name.removesuffix(probe), ""))
        if probe.endswith(f".{name}"):
            prefixes.add(("", probe.removesuffix(name)))

    def match(added: str, removed: str) -> dict[str, str]:
        names = {n: added + n.removeprefix(removed) for n in others if n.startswith(removed)}
        return {name: mine for name, mine in names.items() if mine in own}

    return max((match(*prefix) for prefix in sorted(prefixes)), key=len)


def export_file(weights: Source, path: Path) -> int:
    """Write all weights into one safetensors file, tied ones under each of their names.

    Returns:
        Bytes of the tensors.

    Raises:
        UsageError: the file cannot be written; an existing file is unchanged.
        DataFileError: the checkpoint is damaged.
    """
    make_directory(path.absolute().parent)
    layouts = {name: weights.layout(name) for name in weights}
    with _whole(path) as partial:
        write_tensors(partial, layouts, weights.__getitem__, _METADATA)
    return sum(layout.nbytes for layout in layouts.values())


def export_directory(
    weights: Source, directory: Path, max_bytes: int, like: Path | None = None
) -> int:
    """Write a directory in the form of model hubs: files of at most some size and their index.

    A larger tensor gets a file of its own. A single file has no index. The files get their names
    after all are written, the index last. Returns and raises as :func:`export_file`.

    Args:
        like: a directory of the model, whose configuration and tokenizer are copied.
    """
    make_directory(directory)
    parts = list(_parts({name: weights.layout(name) for name in weights}, max_bytes))
    files = {
        f"model-{index:05d}-of-{len(parts):05d}.safetensors" if len(parts) > 1 else FILE: part
        for index, part in enumerate(parts, 1)
    }
    places = {name: file for file, part in files.items() for name in part}
    total = sum(layout.nbytes for part in parts for layout in part.values())
    index = json.dumps({"metadata": {"total_size": total}, "weight_map": places}, indent=1)
    with ExitStack() as ends:
        if len(parts) > 1:
            write_text(ends.enter_context(_whole(directory / INDEX)), f"{index}\n")
        for file, part in files.items():
            partial = ends.enter_context(_whole(directory / file))
            write_tensors(partial, part, weights.__getitem__, _METADATA)
        for path in sorted(like.iterdir()) if like is not None and like.is_dir() else ():
            is_index = path.name.endswith(".index.json")
            if path.suffix in _COPIED and not is_index and path.is_file():
                shutil.copyfile(path, ends.enter_context(_whole(directory / path.name)))
    return total


def export_dcp(weights: Source, directory: Path) -> int:
    """Write a directory that ``torch.distributed.checkpoint.load`` reads.

    Returns and raises as :func:`export_file`.
    """
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    class Reader(DefaultSavePlanner):
        def lookup_object(self, index: Any) -> Tensor:
            return weights[index.fqn]

    layouts = {name: weights.layout(name) for name in weights}
    make_directory(directory.absolute().parent)
    with _whole(directory) as partial, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about a single process
        try:
            save(layouts, storage_writer=FileSystemWriter(partial), planner=Reader(), no_dist=True)
        except CheckpointException as error:
            ((failure, _),) = error.failures.values()
            raise failure from None
    return sum(layout.nbytes for layout in layouts.values())


def _parts(layouts: Mapping[str, Tensor], max_bytes: int) -> Iterator[dict[str, Tensor]]:
    part, size = dict[str, Tensor](), 0
    for name, layout in layouts.items():
        if part and size + layout.nbytes > max_bytes:
            yield part
            part, size = {}, 0
        part[name] = layout
        size += layout.nbytes
    if part:
        yield part


@contextmanager
def _whole(path: Path) -> Iterator[Path]:
    """A temporary file or directory that replaces ``path`` at the end; removed on failure.

    It is in a directory that nobody else can enter: others may write to that of ``path``.
    """
    parent = path.parent
    try:
        with TemporaryDirectory(
            prefix=f".{path.name}.", dir=parent, ignore_cleanup_errors=True
        ) as hidden:
            new = Path(hidden) / "new"
            new.mkdir()
            new.chmod(parent.stat().st_mode & _MODE)  # files are as private as their directory
            yield new / path.name
            (new / path.name).replace(path)
    except OSError as error:
        raise UsageError(
            f"{path}: cannot be written: {error.strerror or error}",
            hint="choose a directory you may write to, or free some space",
        ) from error
