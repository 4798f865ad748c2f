"""What rank 0 makes of the manifests of all ranks."""

from __future__ import annotations

from concurrent.futures import Future
from pathlib import Path

import pytest

from pipectl.runtime.checkpoint import Keep, saver
from pipectl.runtime.manifest import Manifest


@pytest.mark.parametrize("updates", [(5, 0), (0, 5)])
def test_the_manifest_has_the_updates_of_the_rank_that_made_most(
    tmp_path: Path, updates: tuple[int, int]
) -> None:
    """Ranks that only compute forwards move no schedule of learning rates."""
    (partial := tmp_path / ".step-000007.partial-1").mkdir()
    reports: list[Manifest | str] = [Manifest(7, 4, {}, updates=count) for count in updates]
    save = saver._Save(Manifest(7, 4, {}), partial, Future(), reports=reports)
    saver._commit(tmp_path, save, Keep(1))
    assert Manifest.load(tmp_path / "step-000007").updates == 5
