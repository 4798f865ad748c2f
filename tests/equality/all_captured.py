"""Captures every model of the equality table, so that ranks forked from this process need not.

Those without dropout only if every run of the tests trains them.
"""

from tests.equality.cell_jobs import MODELS, captured
from tests.equality.cells import sampled

for model in MODELS:
    captured(model, plain=False)
for cell in sampled(1):
    if cell.plain:
        captured(cell.model, plain=True)
