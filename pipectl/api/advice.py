"""What errors advise to do, in terms of Python: use cases name the commands and their options."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

from pipectl.errors import PipectlError

_NAME = r"(?: (?:'[^']*'|(?!--)[^\s`;,()'-][^\s`;,()]*))?"
"""Of a run or a file, after a command."""
_VALUE = r"([\w.\[\]]+)=([^\s`;,()]+)"
_RULES = tuple(
    (re.compile(pattern), words)
    for pattern, words in (
        (rf"pipectl resume{_NAME} --set {_VALUE}", r'run.resume(**{"\1": \2})'),
        (rf"pipectl resume --force{_NAME}", "run.resume(force=True)"),
        (rf"pipectl resume --with-changed-code{_NAME}", "run.resume(with_changed_code=True)"),
        (rf"pipectl submit{_NAME} --scheduler (\w+)(?: --wait)?", r'Job(job, scheduler="\1")'),
        (r"pipectl plan JOB\.yaml --new-micro-batches", "job.plan(new_micro_batches=True)"),
        (r"pipectl profile JOB\.yaml(?! --links)(?: --wait)?", "job.profile()"),
        (r"pipectl plan JOB\.yaml", "job.plan()"),
        (rf"pipectl (resume|status|logs|cancel|export){_NAME}(?! *--)", r"run.\1()"),
        (rf"--set {_VALUE}", r'Job(job, **{"\1": \2})'),
        (r"--trust-owner", "trust_owner=True"),
        (r"--with-changed-code", "with_changed_code=True"),
        (r"--force", "force=True"),
        (r"--step\b", "step="),
    )
)


def in_python(advice: str) -> str:
    """Return advice with calls in the place of commands: ``run.resume(force=True)``."""
    for pattern, words in _RULES:
        advice = pattern.sub(words, advice)
    return advice


@contextmanager
def advising() -> Iterator[None]:
    """Let errors within the block, or the function that it decorates, advise in terms of Python."""
    try:
        yield
    except PipectlError as error:
        if error.hint is not None:
            error.hint = in_python(error.hint)
        raise
