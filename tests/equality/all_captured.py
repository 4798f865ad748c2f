"""Captures every model of the equality table, so that ranks forked from this process need not."""

from cell_jobs import MODELS, captured

for model in MODELS:
    for plain in (False, True):
        captured(model, plain=plain)
