"""Captures every model of the equality table, so that ranks forked from this process need not.

Plans two of its cells, too: that loads the compiled kernels of schedules.
"""

from cell_jobs import MODELS, captured
from cells import CHUNKS, Cell
from cuts import random_cut
from plans import make_plan

for model in MODELS:
    for plain in (False, True):
        captured(model, plain=plain)
for schedule in ("1f1b", "zb-v"):
    graph = captured("gpt", plain=False).job.training_graph(2)
    stages = random_cut(graph, 2 * CHUNKS.get(schedule, 1), 0)
    make_plan(graph, stages, Cell("gpt", schedule, "divisible"), 2)
