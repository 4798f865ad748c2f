"""Writing checkpoints while training goes on.

Ranks copy their states at once, and a thread per rank writes them to a folder with a temporary
name; a rank without memory for the copy waits for its thread. Each rank reports its files to rank
0, which adds the manifest and gives the folder its final name. If the job ends before that moment,
the earlier checkpoints are unchanged.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from pipectl.errors import UsageError, limit_of
from pipectl.files import make_private_directory
from pipectl.runs import best_checkpoint, checkpoints, step_of
from pipectl.runtime.checkpoint.snapshot import Snapshot, sync
from pipectl.runtime.manifest import Manifest, Shard
from pipectl.runtime.waiting import barrier, broadcast, gather_all, poll
from pipectl.units import format_bytes

if TYPE_CHECKING:
    from mpi4py import MPI

_MARGIN = 1.02
"""Required free space over the bytes of the tensors: headers, the manifest."""
_HINT = "free some space, or set output.directory to a larger disk"


@dataclass(frozen=True)
class Keep:
    """Which checkpoints to keep: the newest, permanently one every so many steps, and the best."""

    keep: int
    keep_every: int | None = None
    keep_best: bool = False

    def drops(self, directory: Path, step: int) -> list[Path]:
        """The checkpoints to delete after the one of ``step`` is complete.

        Later ones were damaged when the run resumed before them, so they do not count.
        """
        steps_of = [(path, step_of(path) or 0) for path in checkpoints(directory)]
        old = [(path, at) for path, at in steps_of if at <= step][self.keep :]
        best = best_checkpoint(directory, step) if self.keep_best and old else None
        return [
            path
            for path, at in old
            if not (self.keep_every and at % self.keep_every == 0)
            if best is None or path != best.path
        ]


@dataclass
class _Save:
    """A checkpoint that is being written.

    Attributes:
        written: the manifest of this rank with its files, or an error.
        reports: the same of all ranks, on rank 0.
    """

    manifest: Manifest
    partial: Path
    written: Future[Manifest | str]
    is_reported: bool = False
    reports: list[Manifest | str] = field(default_factory=list)
    committed: Future[None] | None = None


class Saver:
    """Writes the checkpoints of a run, one at a time.

    Args:
        communicator: used for nothing else; the constructor is collective.
        directory: of all checkpoints.
        attempt: of the job, so that no two attempts write to one temporary name.
        warn: called on rank 0 if a checkpoint could not be written, or if training waits for it.
        ready: whether all other files of a step before its checkpoint are written (called on rank
            0).
    """

    def __init__(
        self,
        communicator: MPI.Comm,
        directory: Path,
        keep: Keep,
        attempt: int,
        warn: Callable[[str], None],
        ready: Callable[[int], bool] = lambda _: True,
    ) -> None:
        from pipectl.runtime.reports import Reports  # begins MPI, which no reader needs

        self._communicator = communicator
        self._directory = directory
        self._keep = keep
        self._attempt = attempt
        self._warn = warn
        self._ready = ready
        self._thread = ThreadPoolExecutor(1, "checkpoint")
        self._reports = Reports[Manifest | str](communicator)
        self._save: _Save | None = None
        self._failure = ""
        self._has_waited = False
        if communicator.rank == 0:
            _remove_leftovers(directory)
        barrier(communicator)

    def start(self, manifest: Manifest, snapshot: Snapshot) -> None:
        """Start writing a checkpoint; collective. An earlier one is finished first.

        Args:
            manifest: without files; equal on all ranks but for the losses, which only ranks with
                a schedule have.
        """
        self.wait()
        rank, own = self._communicator.rank, (snapshot.size_bytes, snapshot.is_copy)
        everyone = gather_all(self._communicator, own)
        self._failure = self._lacking(sum(size_bytes for size_bytes, _ in everyone))
        if self._failure:
            self._tell_failure(manifest.step)
            return
        partial = self._directory / f".step-{manifest.step:06d}.partial-{self._attempt}"
        written = self._thread.submit(_write, partial, rank, manifest, snapshot)
        self._save = _Save(manifest, partial, written)
        if rank == 0 and not self._has_waited:
            self._warn_of_waiting(
                {r: size for r, (size, is_copy) in enumerate(everyone) if not is_copy}
            )
        if not snapshot.is_copy:
            poll(written.done)

    def _warn_of_waiting(self, uncopied: Mapping[int, int]) -> None:
        """Warn once if training waits for ranks, given the bytes of those that save no copy."""
        if not uncopied:
            return
        self._has_waited = True
        largest = max(uncopied, key=uncopied.__getitem__)
        more = f" (and {len(uncopied) - 1} more)" if len(uncopied) > 1 else ""
        self._warn(
            f"rank {largest}{more} has no memory for a copy of the "
            f"{format_bytes(uncopied[largest])} that it saves: training waits while they are "
            "written"
        )

    @property
    def is_writing(self) -> bool:
        """Whether a checkpoint is not complete yet, so that this rank's copy may exist."""
        return self._save is not None

    def poll(self) -> None:
        """Advance the checkpoint; never waits for another rank."""
        save = self._save
        if save is None:
            return
        if not save.is_reported and save.written.done():
            save.is_reported = True
            self._reports.send(save.manifest.step, save.written.result())
        if self._communicator.rank:
            if save.is_reported and not self._reports.is_sending:
                self._save = None
            return
        for _, reports in self._reports.collect():
            save.reports = list(reports.values())
        if save.committed is None:
            if save.reports and self._ready(save.manifest.step):
                save.committed = self._thread.submit(_commit, self._directory, save, self._keep)
        elif save.committed.done():
            self._save = None
            if error := save.committed.exception():
                self._failure = str(error) or type(error).__name__
                self._tell_failure(save.manifest.step)

    def finish(self) -> None:
        """Wait until the last checkpoint is complete, and write no other; collective.

        Raises:
            UsageError: it could not be written.
        """
        self.wait()
        self._thread.shutdown()
        failure = broadcast(self._communicator, self._failure)
        if failure:
            raise UsageError(f"{self._directory}: the last checkpoint: {failure}", hint=_HINT)

    def wait_saved(self) -> bool:
        """Wait for the last checkpoint, and return whether it was written; collective."""
        self.wait()
        return not broadcast(self._communicator, self._failure)

    def wait(self) -> None:
        """Wait until the checkpoint is complete, or has failed; collective."""

        def is_idle() -> bool:
            self.poll()
            return self._save is None

        poll(is_idle)
        barrier(self._communicator)

    def _lacking(self, size_bytes: int) -> str:
        """The reason why the directory cannot take the tensors of all ranks, or ""; collective."""
        needed, lacking = int(size_bytes * _MARGIN), ""
        if self._communicator.rank == 0:
            try:
                make_private_directory(self._directory)
                free = shutil.disk_usage(self._directory).free
                if free < needed:
                    lacking = f"it takes {format_bytes(needed)}, and {format_bytes(free)} are free"
            except OSError as error:
                lacking = str(error.strerror or error)
        return broadcast(self._communicator, lacking)

    def _tell_failure(self, step: int) -> None:
        if self._communicator.rank == 0:
            self._warn(f"the checkpoint of step {step} was not written: {self._failure}")


def _write(partial: Path, rank: int, manifest: Manifest, snapshot: Snapshot) -> Manifest | str:
    try:
        make_private_directory(partial)
        weights, training = snapshot.write(partial, rank)
    except Exception as error:  # safetensors has its own exception for a full disk
        return f"{error}{limit_of(error)} (rank {rank})"
    return replace(manifest, weights=tuple(weights), training=tuple(training))


def _commit(directory: Path, save: _Save, keep: Keep) -> None:
    """Rename a complete checkpoint, and delete those no longer kept; if it fails, remove it."""
    try:
        reports = []
        for report in save.reports:
            if isinstance(report, str):
                raise OSError(report)
            reports.append(report)
        weights = (shard for report in reports for shard in report.weights)
        training = (shard for report in reports for shard in report.training)
        manifest = replace(
            reports[0],
            weights=tuple(sorted(weights, key=lambda shard: shard.file)),
            training=tuple(sorted(training, key=lambda shard: shard.file)),
            losses=max((report.losses for report in reports), key=len),
        )
        _check_sizes(save.partial, manifest.shards)
        manifest.save(save.partial)
        _rename(save.partial, directory / f"step-{manifest.step:06d}")
    except BaseException:
        shutil.rmtree(save.partial, ignore_errors=True)
        raise
    for old in keep.drops(directory, manifest.step):
        with suppress(OSError):
            shutil.rmtree(_hide(old), ignore_errors=True)


def _check_sizes(partial: Path, shards: Sequence[Shard]) -> None:
    """Refuse a checkpoint whose files are not all here before an earlier one is deleted for it."""
    for shard in shards:
        file = partial / shard.file
        if not (file.is_file() and file.stat().st_size == shard.size_bytes):
            raise OSError(
                f"{shard.file} is not in {partial.parent} as its rank has written it there; all "
                "nodes must see the same files in output.directory"
            )


def _rename(partial: Path, final: Path) -> None:
    """Rename; an earlier, damaged checkpoint of that step is dropped."""
    for folder in (*(path for path in partial.iterdir() if path.is_dir()), partial):
        sync(folder)
    hidden = _hide(final) if final.exists() else None
    partial.rename(final)
    sync(final.parent)
    if hidden is not None:
        shutil.rmtree(hidden, ignore_errors=True)


def _hide(checkpoint: Path) -> Path:
    """Rename a checkpoint that is to be deleted, so that every visible one is whole."""
    hidden = checkpoint.with_name(f".{checkpoint.name}.dropped")
    shutil.rmtree(hidden, ignore_errors=True)
    return checkpoint.rename(hidden)


def _remove_leftovers(directory: Path) -> None:
    """Remove files of interrupted attempts."""
    for kind in ("partial-*", "dropped"):
        for left in directory.glob(f".step-*.{kind}"):
            shutil.rmtree(left, ignore_errors=True)
