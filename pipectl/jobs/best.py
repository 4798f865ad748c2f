"""Which run of a sweep came out best."""

from __future__ import annotations

from collections.abc import Sequence

from pipectl.batch import JobState
from pipectl.jobs.status import RunStatus

_LOSS = "loss"


def best_of(found: Sequence[RunStatus]) -> RunStatus | None:
    """Of the runs that have completed, the one with the lowest loss.

    That of the evaluation counts where all of them have one, else that of the last step; other
    metrics do not, since nobody says whether more of them is better.

    Returns:
        None where fewer than two can be compared.
    """
    over = [status for status in found if status.job.state is JobState.COMPLETED]
    evaluated = bool(over) and all(_LOSS in status.measured.evaluation for status in over)
    rated = [(loss, status) for status in over if (loss := _loss(status, evaluated)) is not None]
    return min(rated, key=lambda pair: pair[0])[1] if len(rated) > 1 else None


def _loss(status: RunStatus, evaluated: bool) -> float | None:
    found = status.measured
    return found.evaluation.get(_LOSS) if evaluated else found.last_loss
