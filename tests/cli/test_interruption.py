"""Signals that end a command, one way or another."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING

import pytest

from pipectl.cli.failure import interruptible

if TYPE_CHECKING:
    from conftest import Command

BOTH = (signal.SIGTERM, signal.SIGHUP)


@pytest.mark.parametrize("how", BOTH)
def test_the_first_signal_interrupts_and_none_ends_the_tidying_up(how: signal.Signals) -> None:
    before = [signal.getsignal(number) for number in BOTH]
    tidied = []

    def command() -> None:
        try:
            signal.raise_signal(how)
        finally:
            for number in BOTH:
                signal.raise_signal(number)
                tidied.append(number)

    with pytest.raises(KeyboardInterrupt), interruptible():
        command()
    assert tidied == list(BOTH)
    assert [signal.getsignal(number) for number in BOTH] == before


def test_what_is_ignored_or_taken_stays_so() -> None:
    def taken(*_: object) -> None:
        pass

    before = [signal.signal(BOTH[0], signal.SIG_IGN), signal.signal(BOTH[1], taken)]
    try:
        with interruptible():
            for number in BOTH:
                signal.raise_signal(number)
        assert [signal.getsignal(number) for number in BOTH] == [signal.SIG_IGN, taken]
    finally:
        for number, how in zip(BOTH, before, strict=True):
            signal.signal(number, how)


@pytest.mark.parametrize("how", [signal.SIGINT, *BOTH])
def test_every_command_ends_in_order(
    cli: Command, monkeypatch: pytest.MonkeyPatch, how: signal.Signals
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        signal.raise_signal(how)

    monkeypatch.setattr("pipectl.cli.commands.status.get_statuses", interrupted)
    result = cli("status")
    assert (result.code, result.out, result.err) == (130, "", "")
