"""Options that would otherwise be left aside without a word."""

from __future__ import annotations

from collections.abc import Mapping

from pipectl.errors import UsageError


def refuse(options: Mapping[str, object], why: str, *, cure: str | None = None) -> None:
    """Refuse options that have no meaning beside others.

    Args:
        options: by their names; None, False and what is empty was not given.

    Raises:
        UsageError: naming the first that was given.
    """
    for name, value in options.items():
        if value or (isinstance(value, int | float) and value is not False):  # 0 was given
            raise UsageError(f"{name}: {why}", cure=cure)


def choose_one(**options: object) -> None:
    """Refuse more than one of flags that each ask for something else: ``dry_run=True``.

    Raises:
        UsageError: naming them.
    """
    given = [f"--{name.replace('_', '-')}" for name, value in options.items() if value]
    if len(given) > 1:
        raise UsageError(f"{' and '.join(given)}: choose one")
