"""How many steps a script makes, in which order it reads samples, and what init says of losses."""

import ast
import json
import os
import signal
import sys
from itertools import count, islice

import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from pipectl.capture import CapturedJob
from pipectl.capture.build import training_loader
from pipectl.errors import CaptureError
from pipectl.runtime.optimizer import make_updater
from pipectl.script import Command, Parts, order
from pipectl.script.halves import Kind, kind_of_loss
from pipectl.script.later import compare_steps
from pipectl.script.steps import steps_of
from pipectl.script.values import UnknownError, evaluated, value_of
from pipectl.spec import load

ROWS = (
    "class Stream(torch.utils.data.IterableDataset):\n    def __iter__(self): return iter(data)\n"
)
ENDS = {
    "counts and breaks": (
        "for epoch in range(9):\n    for x, y in loader:\n        {step}\n        number += 1\n"
        "        if number >= 6: break\n    if number >= 6: break",
        6,
    ),
    "counts batches of two": (
        "for epoch in range(9):\n    for i, (x, y) in enumerate(loader):\n"
        "        criterion(model(x), y).backward()\n        if (i + 1) % 2 == 0:\n"
        "            optimizer.step(); optimizer.zero_grad()\n"
        "        number += 1\n        if number == 6: break\n    if number == 6: break",
        3,
    ),
    "counts steps of two batches": (
        "for epoch in range(9):\n    for i, (x, y) in enumerate(loader):\n"
        "        criterion(model(x), y).backward()\n        if (i + 1) % 2 == 0:\n"
        "            optimizer.step()\n            optimizer.zero_grad()\n            number += 1\n"
        "            if number == 6: break\n    if number == 6: break",
        6,
    ),
    "while": ("while number < 7:\n    for x, y in loader:\n        {step}\n        number += 1", 8),
    "asks for None, and counts in an object": (
        "args = type('Args', (), dict(number=0, steps=5))\nfor epoch in range(9):\n"
        "    for x, y in loader:\n        {step}\n        args.number += 1\n"
        "        if args.steps is not None and args.number > args.steps: break\n"
        "    if args.number > args.steps: break",
        6,
    ),
    "a part of the data": (
        "from itertools import islice\nfor epoch in range(2):\n"
        "    for i, (x, y) in enumerate(islice(loader, 3)):\n        {step}",
        6,
    ),
    "while it is no more": (
        "while number <= 6:\n    for x, y in loader:\n        {step}\n        number += 1",
        8,
    ),
    "folds": (
        "for fold in range(3):\n"
        "    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "    for epoch in range(2):\n        for x, y in loader:\n            {step}",
        8,
    ),
    "rounds as a float": (
        "args = type('Args', (), dict(epochs=3.0))\nfor epoch in range(int(args.epochs)):\n"
        "    for x, y in loader:\n        {step}",
        12,
    ),
    "rounds of a function that changes nothing": (
        "import math\nconfig = dict(epochs=2)\n"
        "for epoch in range(max(1, math.ceil(config.get('epochs', 9) / 1))):\n"
        "    for x, y in loader:\n        {step}",
        8,
    ),
    "a bar with a name": (
        "for epoch in (bar := list(range(3))):\n    for x, y in (rows := enumerate(loader)):\n"
        "        x, y = y\n        {step}",
        12,
    ),
    "several rates": ("for rate in [0.1, 0.01]:\n    for x, y in loader:\n        {step}", 8),
    "phases": (
        "for epoch in range(2):\n    for phase in ['train', 'val']:\n"
        "        for x, y in loader:\n            if phase == 'train':\n                {step}",
        8,
    ),
    "a generator of the user": (
        "class Moved:\n    def __iter__(self):\n        for x, y in loader: yield x, y\n"
        "for epoch in range(2):\n    for x, y in Moved():\n        {step}",
        8,
    ),
    "the shorter of two": (
        "for epoch in range(2):\n    for _, (x, y) in zip(range(3), loader):\n        {step}",
        6,
    ),
    "no more than there is": (
        "from itertools import islice\nfor epoch in range(2):\n"
        "    for x, y in islice(loader, 90):\n        {step}",
        8,
    ),
    "a loop of its own reads the batches of a step": (
        "stream = iter(loader)\nfor _ in range(2):\n    for _ in range(2):\n"
        "        x, y = next(stream)\n        criterion(model(x), y).backward()\n"
        "    optimizer.step(); optimizer.zero_grad()",
        2,
    ),
    "every round reads two batches": (
        "stream = iter(loader)\nfor i in range(2):\n    x, y = next(stream)\n"
        "    criterion(model(x), y).backward()\n    x, y = next(stream)\n    {step}",
        2,
    ),
    "rounds read the batches of a step": (
        "stream = iter(loader)\nfor i in range(4):\n    x, y = next(stream)\n"
        "    criterion(model(x), y).backward()\n    if i % 2:\n"
        "        optimizer.step(); optimizer.zero_grad()",
        2,
    ),
    "a while that counts epochs": (
        "while number < 3:\n    for x, y in loader:\n        {step}\n    number += 1",
        12,
    ),
    "a while that counts epochs of a function": (
        "def fit():\n    for x, y in loader:\n        {step}\n"
        "while True:\n    fit()\n    number += 1\n    if number >= 3: break",
        12,
    ),
    "a stream with a length": (
        f"{ROWS}    def __len__(self): return 32\nfor epoch in range(2):\n"
        "    for x, y in DataLoader(Stream(), batch_size=8):\n        {step}",
        8,
    ),
    "folds on one line": (
        "def fit(fold):\n    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "    for x, y in loader:\n        {step}\nfor fold in range(3): fit(fold)",
        4,
    ),
    "ends the inner loop alone": (
        "for epoch in range(4):\n    for x, y in loader:\n        {step}\n        number += 1\n"
        "        if number >= 6: break",
        8,
    ),
    "ends the inner loop once": (
        "for epoch in range(4):\n    for x, y in loader:\n        {step}\n        number += 1\n"
        "        if number == 6: break",
        14,
    ),
    "counts from one": (
        "number = 1\nfor epoch in range(9):\n    for x, y in loader:\n        {step}\n"
        "        number += 1\n        if number > 6: break\n    if number > 6: break",
        6,
    ),
    "asks before the step": (
        "for epoch in range(9):\n    for x, y in loader:\n        if number >= 6: break\n"
        "        {step}\n        number += 1",
        6,
    ),
    "asks before an epoch": (
        "for epoch in range(9):\n    if number >= 6: break\n    for x, y in loader:\n"
        "        {step}\n        number += 1",
        8,
    ),
    "returns": (
        "state = type('State', (), dict(number=0))\ndef epoch_of():\n"
        "    for x, y in loader:\n        {step}\n        state.number += 1\n"
        "        if state.number >= 6: return\nfor epoch in range(4): epoch_of()",
        8,
    ),
    "counts where gradients are whole": (
        "accelerator = type('Accelerator', (), dict(sync_gradients=True))\n"
        "for epoch in range(2):\n    for x, y in loader:\n        with torch.enable_grad():\n"
        "            {step}\n        if accelerator.sync_gradients:\n            number += 1\n"
        "        if number >= 3: break",
        4,
    ),
    "settings that end nothing": (
        "import argparse\nargs = argparse.Namespace(steps=-1, dry_run=False)\n"
        "for epoch in range(2):\n    for x, y in loader:\n        {step}\n        number += 1\n"
        "        if args.dry_run: break\n"
        "        if args.steps > 0 and number >= args.steps: break",
        8,
    ),
    "a setting that ends": (
        "import argparse\nargs = argparse.Namespace(steps=6)\n"
        "for epoch in range(2):\n    for x, y in loader:\n        {step}\n        number += 1\n"
        "        if args.steps > 0 and number >= args.steps: break",
        6,
    ),
    "larger than what there is": (
        "for epoch in range(2):\n    for x, y in loader:\n        {step}\n        number += 1\n"
        "        if number >= 60: break",
        8,
    ),
}
"""Loops over 4 batches, and the steps that they make; of folds, those of the first one."""
STEP = "criterion(model(x), y).backward(); optimizer.step(); optimizer.zero_grad()"
TOLD = """
from torch.utils.data.distributed import DistributedSampler
sampler = DistributedSampler(data, num_replicas=1, rank=0, seed=3)
loader = DataLoader(data, batch_size=8, sampler=sampler)
for epoch in range(3):
    sampler.set_epoch(epoch)
    for x, y in loader:
        order.append(x[:, 0])
        {step}
"""
COUNTS = """
class Counting(torch.utils.data.Sampler):
    epoch = 0
    def __init__(self): self.epoch = 0
    def __len__(self): return 32
    def __iter__(self):
        yield from torch.randperm(32, generator=torch.Generator().manual_seed(self.epoch)).tolist()
        self.epoch += 1
loader = DataLoader(data, batch_size=8, sampler=Counting())
for epoch in range(3):
    for x, y in loader:
        order.append(x[:, 0])
        {step}
"""


def written(tmp_path, beginning, text):
    """The command of a script with these loops."""
    path = tmp_path / "script.py"
    path.write_text(f"{beginning}number, order = 0, []\n{text.format(step=STEP)}\n")
    return Command(str(path))


@pytest.mark.parametrize("name", ENDS)
def test_steps_end_where_the_script_counts_them(beginning, tmp_path, name):
    text, steps = ENDS[name]
    assert steps_of(Parts.of(written(tmp_path, beginning, text))).total == steps
    made: list[object] = []
    handle = register_optimizer_step_pre_hook(lambda *_: made.append(None))
    try:
        exec((tmp_path / "script.py").read_text(), {})
    finally:
        handle.remove()
    assert len(made) == steps * (3 if "fold in range(3)" in text else 1)


UNCOUNTED = {
    "in each epoch": (
        "for epoch in range(3):\n    number, stream = 0, iter(loader)\n    while number < 2:\n"
        "        x, y = next(stream)\n        {step}\n        number += 1"
    ),
    "in a function": (
        "def fit():\n    count = 0\n    for x, y in loader:\n        {step}\n"
        "        count += 1\n        if count >= 2: break\nfor epoch in range(3): fit()"
    ),
    "in an object that a function makes anew": (
        "state = type('State', (), dict(number=0))\ndef fit():\n    state.number = 0\n"
        "    for x, y in loader:\n        {step}\n        state.number += 1\n"
        "        if state.number >= 2: return\nfor epoch in range(3): fit()"
    ),
    "from one, of two batches": (
        "number = 1\nfor epoch in range(9):\n    for i, (x, y) in enumerate(loader):\n"
        "        criterion(model(x), y).backward()\n        if (i + 1) % 2 == 0:\n"
        "            optimizer.step()\n            optimizer.zero_grad()\n            number += 1\n"
        "            if number > 6: break\n    if number > 6: break"
    ),
    "before the step": (
        "for epoch in range(2):\n    for x, y in loader:\n        number += 1\n        {step}\n"
        "        if number >= 6: break"
    ),
    "in other places, too": (
        "for epoch in range(2):\n    for x, y in loader:\n        {step}\n        number += 1\n"
        "        if number >= 6: break\n    number += 1"
    ),
    "under another condition": (
        "for epoch in range(2):\n    for x, y in loader:\n        {step}\n        number += 1\n"
        "        if len(order) > 9:\n            if number >= 2: break"
    ),
    "or something else": (
        "for epoch in range(2):\n    for x, y in loader:\n        {step}\n        number += 1\n"
        "        if number == 60:\n            pass\n        elif number >= 2:\n            break"
    ),
    "until the next epoch asks for something else": (
        "for epoch in range(4):\n    for x, y in loader:\n        {step}\n        number += 1\n"
        "        if number >= 6:\n            order = None\n            break\n"
        "    if order is None: break"
    ),
    "of an epoch": (
        "for epoch in range(2):\n    for i, (x, y) in enumerate(loader):\n        {step}\n"
        "        if i >= 2: break"
    ),
    "no phases": (
        "scaled = True\nfor name in ['small', 'large']:\n    for x, y in loader:\n"
        "        if scaled:\n            {step}"
    ),
    "the shorter of two": (
        "for epoch in range(2):\n    for (x, y), _ in zip(loader, map(int, '01')):\n        {step}"
    ),
    "a part of a known length": (
        "from itertools import islice\npart = loader, 2\nfor epoch in range(2):\n"
        "    for x, y in islice(*part):\n        {step}"
    ),
    "a trainer that leaves batches out": (
        "class Trainer:\n    max_steps, max_epochs, num_training_batches = -1, 2, 3\n"
        "Trainer.__module__, trainer = 'lightning.trainer', Trainer()\n"
        "for epoch in range(2):\n    for x, y in loader:\n        {step}"
    ),
}
"""Loops that end by counts that are none of the steps of the script."""


@pytest.mark.parametrize("name", UNCOUNTED)
def test_other_counts_are_not_taken_for_those_of_the_steps(beginning, tmp_path, name):
    found = steps_of(Parts.of(written(tmp_path, beginning, UNCOUNTED[name])))
    assert found.total is None


def test_what_only_the_users_code_computes_has_no_value():
    class Held:
        @property
        def part(self):
            raise RuntimeError

    def node_of(text):
        return ast.parse(text, mode="eval").body

    names = {"held": Held(), "stream": count()}
    assert value_of(node_of("held.part"), names) is None
    for text in ("-1 in stream", "-1 not in stream", "max(stream)", "held.part"):
        with pytest.raises(UnknownError):
            evaluated(node_of(text), names)


UNKNOWN = {
    "no end": (
        "import itertools\nfor epoch in itertools.count():\n    for x, y in loader:\n        {step}"
    ),
    "a generator of the user": (
        "def epochs(): yield from range(3)\n"
        "for epoch in epochs():\n    for x, y in loader:\n        {step}"
    ),
    "data read several times": (
        "def batches():\n    for epoch in range(3):\n        for batch in loader:\n"
        "            yield batch\nfor x, y in batches():\n    {step}"
    ),
    "data read in part": (
        "def batches():\n    for i, batch in enumerate(loader):\n        if i == 3: break\n"
        "        yield batch\nfor epoch in range(3):\n    for x, y in batches():\n        {step}"
    ),
    "a stream": (
        f"{ROWS}for epoch in range(3):\n"
        "    for x, y in DataLoader(Stream(), batch_size=8):\n        {step}"
    ),
    "several data": ("for name in ['small', 'large']:\n    for x, y in loader:\n        {step}"),
    "rounds without a step": (
        "stream = iter(loader)\nfor i in range(4):\n    x, y = next(stream)\n    if i > 0:\n"
        "        {step}"
    ),
}
"""Loops that may run any number of times, as far as their text tells."""


@pytest.mark.parametrize("name", UNKNOWN)
def test_steps_that_the_text_does_not_tell_are_guessed_openly(found_in, beginning, tmp_path, name):
    found = found_in(written(tmp_path, beginning, UNKNOWN[name]))
    (named,) = [each for each in found.differs if each.what == "steps"]
    assert "is a guess" in named.value
    assert found.guessed == ["steps"]
    assert not [each for each in found.taken if each.what == "steps"]


def test_epochs_of_any_number_come_again(beginning, tmp_path):
    """So that what a second epoch does otherwise is looked at."""
    text = "for epoch in map(int, '012'):\n    for x, y in loader:\n        {step}"
    assert compare_steps(written(tmp_path, beginning, text)).epochs == 2


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("for i in range(9):\n    x, y = next(iter(loader))\n    {step}", "begins the data anew"),
        (
            "for i, (x, y) in enumerate(loader):\n    if i != 1:\n        {step}",
            "leaves out batches",
        ),
        ("other = DataLoader(data, batch_size=8)\nstreams = [iter(loader), iter(other)]\n"
         "for i in range(4):\n    x, y = next(streams[i % 2])\n    {step}", "begins the data anew"),
    ],
    ids=["the first batch", "not all", "two loaders"],
)  # fmt: skip
def test_batches_that_are_not_read_in_turn_are_named(found_in, beginning, tmp_path, text, words):
    found = found_in(written(tmp_path, beginning, text))
    (named,) = [each for each in found.differs if each.what == "samples"]
    assert named.value.startswith(f"step 2 {words}")
    assert not [each for each in found.taken if each.what == "order"]


ACCUMULATES = """
{before}
for epoch in range(2):
    for i, (x, y) in enumerate(loader):
        criterion(model(x), y).backward()
        is_last = i == len(loader) - 1
        if {test}:
            {step}
    {after}
    schedule.step()
"""
STEP_OF_SEVERAL = (
    "optimizer.step(); optimizer.zero_grad(); order.append(optimizer.param_groups[0]['lr'])"
)
SCALED_STEP = STEP_OF_SEVERAL.replace("optimizer.step()", "scaler.step(optimizer); scaler.update()")
SCHEDULE = "schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)\n"


@pytest.mark.parametrize(
    ("drops", "test", "after"),
    [
        (False, "(i + 1) % 3 == 0 or i + 1 == len(loader)", ""),
        (True, "is_last or i % 3 == 2", ""),
        (False, "(i + 1) % 3 == 0", ""),
        (False, "(i + 1) % 3 == 0", f"if (i + 1) % 3: {STEP_OF_SEVERAL}"),
        (False, "(i + 1) % 3 == 0", f"if (i + 1) % 3: {SCALED_STEP}"),
    ],
    ids=[
        "stepped",
        "stepped, without a part of a batch",
        "left out",
        "stepped after the loop",
        "stepped by a scaler after the loop",
    ],
)
def test_batches_left_at_the_end_of_an_epoch_are_a_step_as_in_the_script(
    found_in, beginning, tmp_path, drops, test, after
):
    before = "scaler = torch.amp.GradScaler('cpu', enabled=False)\n"
    before += SCHEDULE + f"loader = DataLoader(data, 3, shuffle=True, drop_last={drops})\n"
    text = ACCUMULATES.format(before=before, test=test, step=STEP_OF_SEVERAL, after=after)
    (tmp_path / "own.py").write_text(f"{beginning}order = []\n{text}")
    space: dict[str, list[float]] = {}
    exec((tmp_path / "own.py").read_text(), space)
    command = written(tmp_path, beginning, text.replace("{", "{{").replace("}", "}}"))
    found, parts = found_in(command), Parts.of(command)
    assert found.training["steps"] == len(space["order"])
    assert [each.what for each in found.differs] == ["accumulation"]
    job = {"script": {"file": command.file}, "training": found.training, "data": found.data}
    (tmp_path / "job.yaml").write_text(json.dumps(job))
    loader = training_loader(load(tmp_path / "job.yaml"), parts)
    assert 2 * len(loader.epoch(0)) == len(space["order"])
    optimizer = parts.make_optimizer(parts.originals)
    schedules = parts.make_schedules(optimizer)
    for rate in space["order"]:
        assert optimizer.param_groups[0]["lr"] == rate
        schedules.step()


@pytest.mark.parametrize(
    "read",
    [
        "x, y = next(batches)",
        "try: x, y = next(batches)\n"
        "        except StopIteration:\n"
        "            batches = iter(loader)\n            x, y = next(batches)",
    ],
    ids=["endless", "begun again"],
)
def test_a_step_that_goes_on_in_the_next_epoch_is_named(found_in, beginning, tmp_path, read):
    text = (
        "loader = DataLoader(data, 3, shuffle=True)\ndef endless():\n    while True:\n"
        f"        yield from loader\nbatches = {'iter(loader)' if 'try' in read else 'endless()'}\n"
        "for step in range(9):\n    for part in range(2):\n"
        f"        {read}\n        criterion(model(x), y).backward()\n"
        f"    optimizer.step(); optimizer.zero_grad()\n"
    )
    (tmp_path / "script.py").write_text(f"{beginning}{text}")
    order, found = found_in(Command(str(tmp_path / "script.py"))).differs
    assert (order.what, found.what) == ("order", "accumulation")
    assert "fills the last step of an epoch from" in found.value


def test_schedules_of_epochs_follow_the_epochs_of_the_job(beginning, tmp_path):
    """Which divides the samples as its keys say."""
    text = f"{SCHEDULE}for epoch in range(2):\n    for x, y in loader:\n        {{step}}\n"
    command = written(tmp_path, beginning, f"{text}    schedule.step()")
    training = {"batch_size": 12, "steps": 1}
    for drops, rates in ((False, [0.1, 0.1, 0.1, 0.05]), (True, [0.1, 0.1, 0.05, 0.05])):
        job = {"script": {"file": command.file}, "training": training, "data": {"drop_last": drops}}
        (tmp_path / "job.yaml").write_text(json.dumps(job))
        made = CapturedJob(load(tmp_path / "job.yaml"))
        updater, found = make_updater(made, dict(made.wrapper.named_parameters())), []
        for _ in rates:
            found.append(updater.learning_rate)
            updater.step_schedule()
        assert found == rates


def test_a_loop_over_a_part_of_the_data_is_named(found_in, beginning, tmp_path):
    found = found_in(written(tmp_path, beginning, ENDS["a part of the data"][0]))
    assert [each.what for each in found.differs if "islice" in each.value] == ["batches"]


def test_steps_of_a_function_that_reads_data_again_and_again_are_not_known(beginning, tmp_path):
    text = (
        "def batches(n):\n    while True:\n        for batch in loader:\n            yield batch\n"
        "            n -= 1\n            if not n: return\n"
        "for i, (x, y) in enumerate(batches(9)):\n    {step}"
    )
    assert steps_of(Parts.of(written(tmp_path, beginning, text))).total is None


def test_a_break_of_another_kind_is_named(found_in, beginning, tmp_path):
    text = (
        "for epoch in range(2):\n    for x, y in loader:\n        {step}\n        number += 1\n"
        "        if number >= 6: break\n    if epoch > 0 and number > 3: break"
    )
    command = written(tmp_path, beginning, text)
    found = found_in(command)
    assert [each.what for each in found.differs if "`break`" in each.value] == ["steps"]
    assert found.training["steps"] == 6


def test_a_loop_over_folds_is_named(found_in, beginning, tmp_path):
    command = written(tmp_path, beginning, ENDS["folds"][0])
    found = found_in(command)
    lines = (tmp_path / "script.py").read_text().splitlines()
    named = [each for each in found.differs if "first round" in each.value]
    assert [lines[each.place[1] - 1] for each in named] == ["for fold in range(3):"]


def test_an_epoch_without_end_is_drawn_part_by_part(beginning, tmp_path, monkeypatch):
    """minGPT trains so: all samples of such an epoch would fill any memory."""
    monkeypatch.setattr(order, "_PART", 3)
    text = (
        "endless = torch.utils.data.RandomSampler(data, True, 10**10)\n"
        "for x, y in DataLoader(data, batch_size=8, sampler=endless):\n"
        "    order.append(x[:, 0])\n    if number == 8: break\n    number += 1\n    {step}"
    )
    command = written(tmp_path, beginning, text)
    space: dict[str, list[torch.Tensor]] = {}
    exec((tmp_path / "script.py").read_text(), space)
    wanted = torch.cat(space["order"]).reshape(3, 24)
    data = Parts.of(command).dataset()
    for epoch in (0, 2, 1, 0):
        torch.manual_seed(epoch)
        before = torch.get_rng_state()
        assert [data[i][0][0] for i in data.order(epoch)] == wanted[epoch].tolist()
        assert torch.equal(torch.get_rng_state(), before)


STREAM = """
class Rows(torch.utils.data.IterableDataset):
    rows = range(22)
    def __iter__(self):
        process = torch.utils.data.get_worker_info()
        shares = {shares!r} == "itself" and process is not None
        first, stride = (process.id, process.num_workers) if shares else (0, 1)
        return ((data[i][0], data[i][1]) for i in self.rows[first::stride])
def begin(number):
    process = torch.utils.data.get_worker_info()
    process.dataset.rows = process.dataset.rows[number :: process.num_workers]
begin = begin if {shares!r} == "begin" else None
loader = DataLoader(
    Rows(), batch_size=4, num_workers={processes}, drop_last={drops}, worker_init_fn=begin
)
for epoch in range(2):
    for x, y in loader:
        order.append(x[:, 0])
        {step}
"""


@pytest.mark.parametrize(
    ("processes", "shares", "drops"),
    [
        (2, "", True),
        (3, "itself", False),
        (0, "begin", True),
        (2, "begin", False),
        (1, "begin", True),
    ],
    ids=["each reads all", "each reads a part", "in the script", "each begins", "one begins"],
)
def test_an_iterable_is_read_as_by_the_loader_of_the_script(
    beginning, tmp_path, processes, shares, drops
):
    """Whatever data.workers says, since its processes decide which samples come."""
    text = STREAM.format(processes=processes, shares=shares, drops=drops, step="{step}")
    command = written(tmp_path, beginning, text)
    space: dict[str, list[torch.Tensor]] = {}
    exec((tmp_path / "script.py").read_text(), space)
    wanted = torch.cat(space["order"])
    parts = Parts.of(command)
    training = {"batch_size": 4, "steps": 1}
    for workers in (0, processes):
        job = {"script": {"file": command.file}, "training": training, "data": {"workers": workers}}
        path = tmp_path / "job.yaml"
        path.write_text(json.dumps(job))
        loader = training_loader(load(path), parts)
        next(loader.stream())  # as a profile does
        batches = list(islice(loader.batches(), len(wanted) // 4))
        read = torch.cat([inputs["0"][:, 0] for inputs, _ in loader.micro_batches(batches, 4)])
        assert torch.equal(read, wanted[: len(read)])


OPENED = """
class Opened(torch.utils.data.Dataset):
    def __len__(self): return 8
    def __getitem__(self, i): return self.rows[i], self.number
def begin(number):
    import signal
    signal.signal(signal.SIGUSR1, lambda *_: None)
    torch.set_num_threads(torch.get_num_threads() + 1)
    process = torch.utils.data.get_worker_info()
    process.dataset.rows, process.dataset.number = torch.ones(8, 4), torch.randint(9**9, ())
opened = Opened()
for x, y in DataLoader(opened, batch_size=8, num_workers=1, worker_init_fn=begin):
    optimizer.zero_grad(); model(x).mean().backward(); optimizer.step()
"""


def test_a_dataset_that_its_processes_open_is_read_without_them_too(beginning, tmp_path):
    """The rank stays as it is, and processes that it starts later open it for themselves."""
    parts = Parts.of(written(tmp_path, beginning, OPENED.replace("{", "{{").replace("}", "}}")))
    data, generators = parts.dataset(), order.SharedGenerators()
    before = signal.getsignal(signal.SIGUSR1), torch.get_num_threads()
    _, number = data[0]
    assert number == data[1][1]
    assert not generators.have_drawn()
    assert (signal.getsignal(signal.SIGUSR1), torch.get_num_threads()) == before
    assert torch.utils.data.get_worker_info() is None
    assert not vars(parts.loader.dataset)
    loader = torch.utils.data.DataLoader(data, num_workers=2, collate_fn=lambda pair: pair[0])
    numbers = [number for _, number in loader]
    assert numbers[0] == number, "the first process begins with the same random numbers"
    assert numbers[1] != number


def test_an_iterator_that_is_made_early_draws_its_order_when_it_is_read(beginning, tmp_path):
    text = (
        "stream = iter(loader)\ntorch.rand(3)\n"
        "while True:\n    x, y = next(stream)\n    order.append(x[:, 0])\n    {step}\n"
        "    if len(order) == 4: break"
    )
    command = written(tmp_path, beginning, text)
    space: dict[str, list[torch.Tensor]] = {}
    exec((tmp_path / "script.py").read_text(), space)
    data = Parts.of(command).dataset()
    wanted = torch.cat(space["order"]).tolist()
    assert [data[i][0][0] for i in data.order(0)] == wanted


def test_len_of_a_batch_in_another_file_is_its_size(beginning, tmp_path):
    """Otherwise the losses of micro-batches would be divided by the samples of the first batch."""
    (tmp_path / "steps.py").write_text("def mean(losses, x): return losses.sum() / len(x)\n")
    text = (
        "from steps import mean\ncriterion = nn.CrossEntropyLoss(reduction='none')\n"
        "for x, y in loader:\n    mean(criterion(model(x), y), x).backward()\n    optimizer.step()"
    )
    assert kind_of_loss(Parts.of(written(tmp_path, beginning, text))) is Kind.MEAN
    assert "len" not in vars(sys.modules.pop("steps"))


def test_samples_are_read_in_the_directory_that_the_script_is_in(beginning, tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "sample").write_text("0.5")
    text = (
        "import os\nfrom pathlib import Path\nos.chdir(Path(__file__).parent / 'data')\n"
        "class Files(torch.utils.data.Dataset):\n    def __len__(self): return 8\n"
        "    def __getitem__(self, i): return torch.ones(4) * float(open('sample').read()), 0\n"
        "for x, y in DataLoader(Files(), batch_size=8):\n    {step}"
    )
    data = Parts.of(written(tmp_path, beginning, text)).dataset()
    assert data[0][0][0] == 0.5
    assert data.collate_fn([data[0]])["inputs"]["0"].shape == (1, 4)


def test_variables_that_a_script_sets_are_there_when_samples_are_read(
    beginning, tmp_path, monkeypatch
):
    """But for those that say what pipectl decides; another script does not find them."""
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,2")
    names = ("OWN_SCALE", "RANK", "WORLD_SIZE", "CUDA_VISIBLE_DEVICES", "WANDB_MODE")
    before = [*map(os.environ.get, names)]
    text = (
        "import os\nassert not {{'RANK', 'OWN_SCALE'}} & {{*os.environ}}\n"
        "os.environ.update(OWN_SCALE='2', RANK='0', WORLD_SIZE='1', CUDA_VISIBLE_DEVICES='0')\n"
        "class Scaled(torch.utils.data.Dataset):\n    def __len__(self): return 8\n"
        "    def __getitem__(self, i): return torch.ones(4) * int(os.environ['OWN_SCALE']), 0\n"
        "for x, y in DataLoader(Scaled(), batch_size=8):\n    {step}"
    )
    command = written(tmp_path, beginning, text)
    for _ in range(2):
        assert Parts.of(command).dataset()[0][0][0] == 2
        assert [*map(os.environ.get, names)] == ["2", *before[1:]]
    Parts.of(written(tmp_path, beginning, "for x, y in loader:\n    {step}"))
    assert [*map(os.environ.get, names)] == before


def test_a_script_that_sets_threads_runs_in_a_process_that_has_computed(beginning, tmp_path):
    """A process may set those between operators once, and before it computes."""
    before = torch.get_num_threads()
    text = "torch.set_num_threads(7)\nfor _ in range(2): torch.set_num_interop_threads(1)\n"
    Parts.of(written(tmp_path, beginning, text + "for x, y in loader:\n    {step}"))
    assert torch.get_num_threads() == before


def test_a_script_that_ends_writes_nothing_and_leaves_no_handlers(beginning, tmp_path):
    before = signal.getsignal(signal.SIGUSR1)
    text = (
        "import signal\nsignal.signal(signal.SIGUSR1, lambda *_: None)\ntry:\n"
        "    for x, y in loader:\n        {step}\nfinally:\n"
        "    torch.save(model.state_dict(), 'model.pt')\n    open('done', 'w')"
    )
    Parts.of(written(tmp_path, beginning, text))
    assert [each.name for each in tmp_path.iterdir()] == ["script.py"]
    assert signal.getsignal(signal.SIGUSR1) is before


@pytest.mark.parametrize("text", [TOLD, COUNTS], ids=["told", "counts"])
def test_epochs_have_the_order_that_the_sampler_gives_in_the_script(beginning, tmp_path, text):
    command = written(tmp_path, beginning, text)
    space: dict[str, list[torch.Tensor]] = {}
    exec((tmp_path / "script.py").read_text(), space)
    wanted = torch.cat(space["order"]).reshape(3, 32)
    parts = Parts.of(command)
    for data in (parts.dataset(), parts.dataset()):
        for epoch in (0, 1, 2, 0):
            batch = data.collate_fn([data[i] for i in data.order(epoch)])
            assert torch.equal(batch["inputs"]["0"][:, 0], wanted[epoch])


@pytest.mark.parametrize("kind", ["tuple(zip(*samples))", "(torch.cat([x for x, _ in samples]),)"])
def test_batches_that_are_no_stacked_samples_are_refused(beginning, tmp_path, kind):
    """Pictures of several sizes are lists, and texts of several lengths one long text."""
    text = (
        f"def joined(samples): return {kind}\n"
        "loader = DataLoader(data, batch_size=8, collate_fn=joined)\n"
        "for x in loader:\n    x = torch.cat([each.reshape(-1) for each in x[0]]).reshape(-1, 4)\n"
        "    model(x).pow(2).mean().backward()\n    optimizer.step()"
    )
    with pytest.raises(CaptureError, match=r"script.py:\d+: 0(.0)? of a batch of 8") as caught:
        Parts.of(written(tmp_path, beginning, text))
    assert "torch.stack" in caught.value.hint


def test_what_is_only_computed_of_a_whole_batch_is_named(found_in, beginning, tmp_path):
    text = (
        "for x, y in loader:\n    z = model(x)\n"
        "    loss = (z @ z.T - torch.eye(4 * 2)).pow(2).mean()  # here\n"
        "    loss.backward()\n    optimizer.step()\n    optimizer.zero_grad()"
    )
    command = written(tmp_path, beginning, text)
    found = found_in(command)
    (named,) = [each for each in found.differs if each.what == "loss"]
    assert "the number of samples is taken from the batch" in named.value
    assert "# here" in (tmp_path / "script.py").read_text().splitlines()[named.place[1] - 1]


@pytest.mark.parametrize(
    ("drawn", "what"),
    [
        ("numbers.random()", "samples"),
        ("np.random.rand()", "random numbers"),
    ],
)
def test_samples_that_are_others_when_they_are_read_again_are_named(
    found_in, beginning, tmp_path, drawn, what
):
    text = (
        "import numpy as np\nnumbers = np.random.default_rng(3)\n"
        "class Noisy(torch.utils.data.Dataset):\n    def __len__(self): return 16\n"
        f"    def __getitem__(self, i): return data[i][0] + {drawn}, data[i][1]\n"
        "for x, y in DataLoader(Noisy(), batch_size=4):\n    {step}"
    )
    command = written(tmp_path, beginning, text)
    found = found_in(command)
    assert [each.what for each in found.differs] == [what]


def test_batches_whose_samples_are_not_the_first_dimension_are_refused(beginning, tmp_path):
    text = (
        "def columns(samples): return torch.stack([x for x, _ in samples], 1)\n"
        "loader = DataLoader(data, batch_size=8, collate_fn=columns)\n"
        "for x in loader:\n    model(x.T).pow(2).mean().backward()\n    optimizer.step()"
    )
    with pytest.raises(CaptureError, match=r"script.py:\d+: .* has the shape \[4, 8\]") as caught:
        Parts.of(written(tmp_path, beginning, text))
    assert "batch_first=True" in caught.value.hint


def test_losses_and_norms_of_whole_batches_are_named(found_in, beginning, tmp_path):
    """A mean over some of the tokens is nearly that of the halves."""
    text = (
        "model = nn.Sequential(model, nn.BatchNorm1d(3), nn.BatchNorm1d(3).eval())\n"
        "optimizer.add_param_group({{'params': [*model[1:].parameters()]}})\n"
        "criterion = nn.CrossEntropyLoss(ignore_index=0)\n"
        "for x, y in loader:\n    {step}"
    )
    command = written(tmp_path, beginning, text)
    found = found_in(command)
    told = {each.what: each.value for each in found.differs}
    assert "no mean of those of its parts" in told["loss"]
    assert told["batch norm"].startswith("1: the statistics")
    assert "pipeline.micro_batches: 1," in told["batch norm"]


def test_halves_that_are_alike_by_chance_show_nothing(beginning, tmp_path):
    """The classes of the first batch are those of either half of it."""
    text = (
        "y = [0, 1, 2, 0] * 2 + [0, 0, 0, 0, 1, 2, 2, 2] * 3\n"
        "data = TensorDataset(torch.randn(32, 4), torch.tensor(y))\n"
        "loader = DataLoader(data, batch_size=8)\n"
        "criterion = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 4.0]))\n"
        "for x, y in loader:\n    {step}"
    )
    assert kind_of_loss(Parts.of(written(tmp_path, beginning, text))) is Kind.OTHER


def test_batches_that_are_padded_to_other_lengths_are_named(found_in, beginning, tmp_path):
    text = (
        "def padded(samples):\n    x, y = torch.utils.data.default_collate(samples)\n"
        "    return nn.functional.pad(x, (0, len(order))), y\n"
        "loader = DataLoader(data, batch_size=8, collate_fn=padded)\n"
        "for x, y in loader:\n    order.append(0)\n"
        "    criterion(model(x[:, :4]), y).backward(); optimizer.step(); optimizer.zero_grad()"
    )
    command = written(tmp_path, beginning, text)
    found = found_in(command)
    told = {each.what: each.value for each in found.differs}
    assert told["batch"].startswith("0 is [8, 4] in the first batch and [8, 5] in a later one")
