"""Outliving the signals that batch systems send to all processes of a job."""

import signal

_TO_ALL = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


def outlive_signals() -> None:
    """Ignore them: what ranks say of them is to be heard, and how they end is to be seen."""
    for number in _TO_ALL:
        signal.signal(number, signal.SIG_IGN)
