"""Captures every model of the equality table, so that ranks forked from this process need not.

Those without dropout only if every run of the tests trains them.

Plans two of its cells, too: that loads the compiled kernels of schedules.
"""

from cell_jobs import MODELS, captured
from cells import PLAIN, Cell
from plans import plan_and_cut

for model in MODELS:
    captured(model, plain=False)
for model in PLAIN:
    captured(model, plain=True)
for schedule in ("1f1b", "zb-v"):
    graph = captured("gpt", plain=False).job.training_graph(2)
    plan_and_cut(graph, Cell("gpt", schedule, "divisible"), 2, 0)
