"""A user's training script as the source of a job.

**The script is the factory.** Every process of a job runs the user's file as ``__main__`` until its
first optimizer step (`run.py`), and takes what the script has made: nothing is retold, and nothing
is unpickled. Initial weights, options and the order of samples are the script's because the script
itself computed them. The price is one forward of one batch in every process.

**What is seen, and how.** Between a batch of the `DataLoader` and ``backward()`` a torch function
mode records calls of functions (`recorder.py`); few, listed replacements tell of modules, loaders,
clipping and so on (`hooks.py`); a public hook of optimizers ends the script with an exception that
``except Exception`` does not catch. No gradients are computed. Parameters get zeros that cannot be
written, so that a script that changes gradients by hand fails, instead of training differently.

**The step as a program.** The recording is a list of calls (`program.py`). A call of a module with
parameters is one entry, which the capture follows later as in any job. Entries that lead to modules
are the model's part of a step, the others the loss's. Both are run again with other batches, while
torch exports them; so they become operators of the graph like any others. What a job needs:

- another batch size: sizes stay expressions (`numbers.py`); a number that was typed in stays.
- another device: devices that were named become that of the batch.
- random numbers that model and loss share are drawn once: the loss's part gets them as outputs.
- writes in place are repeated in order; into the batch they are refused.
- values that leave torch (``item()``) are refused if the loss depends on them.

**Which model.** The smallest module of the script that contains all that is called; if none does,
the called ones side by side, named like their variables. Names of weights are those in it.

**Optimizers** (`optimizers.py`) are the script's own object, with groups cut down to the parameters
of a rank; schedules are copied for it. A schedule that the script steps outside the loop of its
optimizer steps once in an epoch.

**Checked against.** `later.py` lets the script run on for some steps and into a second epoch, with
the weights it begins with, and compares its losses with those of the recorded first step for the
same batches, and its learning rates: what the script decides in Python step by step is refused.
Nothing is written meanwhile (`unwritten.py`). `halves.py` tells sums from means. `plain.py` runs
the script by itself and reads its losses.
"""

from pipectl.script.parts import Parts
from pipectl.script.run import Command

__all__ = ["Command", "Parts"]
