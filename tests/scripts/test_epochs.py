"""Which samples later epochs of a script have, in the job too, and what init says of others."""

import json
import tracemalloc
from itertools import islice

import pytest
import torch
from torch.utils.data import DataLoader

from pipectl.capture.build import training_loader
from pipectl.script import Command, Parts, read_again
from pipectl.script.order import Generators, Order, Told
from pipectl.spec import load

STEP = "criterion(model(x), y).backward(); optimizer.step(); optimizer.zero_grad()"
EPOCHS = """
{made}
options = dict(num_workers={processes}, persistent_workers={stays})
loader = DataLoader(made, batch_size=8, **options)
for epoch in range(3):
    {before}
    for x, y in loader:
        order.append(x[:, 0])
        {step}
"""
NUMBERED = """
class Numbered(torch.utils.data.Dataset):
    epoch = 0
    def set_epoch(self, epoch): self.epoch = epoch
    def __len__(self): return 32
    def __getitem__(self, i): return data[i][0] * (1 + self.epoch), data[i][1]
"""
STREAM = """
import random
class Stream(torch.utils.data.IterableDataset):
    def __init__(self, kind):
        self.kind, self.epoch, self.random = kind, 0, random.Random(4)
    def set_epoch(self, epoch): self.epoch = epoch
    def __len__(self): return 32
    def __iter__(self):
        kept = self.random if self.kind == "draws" else random.Random(self.epoch)
        self.epoch += self.kind == "counts"
        for i in kept.sample(range(32), 32): yield data[i]
"""
WITHIN = """
class Within(torch.utils.data.IterableDataset):
    def __init__(self, inner): self.parts = [inner]
    def __len__(self): return 32
    def __iter__(self): return iter(self.parts[0])
"""
KINDS = {
    "told": (f"{NUMBERED}made = Numbered()", "made.set_epoch(epoch)"),
    "told from 5": (f"{NUMBERED}made = Numbered()", "made.set_epoch(5 + epoch)"),
    "a part, told": (
        f"{NUMBERED}told = Numbered()\nmade = torch.utils.data.Subset(told, range(32))",
        "told.set_epoch(epoch)",
    ),
    "told with more": (
        f"{NUMBERED}class More(Numbered):\n"
        "    def set_epoch(self, by, epoch=0, *, plus): self.epoch = by * epoch + plus\n"
        "made = More()",
        "made.set_epoch(2, epoch, plus=1)",
    ),
    "told by keywords": (
        f"{NUMBERED}class More(Numbered):\n"
        "    def set_epoch(self, plus, epoch): self.epoch = epoch + plus\n"
        "made = More()",
        "made.set_epoch(plus=3, epoch=epoch)",
    ),
    "stream, told": (f"{STREAM}made = Stream('told')", "made.set_epoch(epoch)"),
    "stream, counts": (f"{STREAM}made = Stream('counts')", ""),
    "stream, counts from 1": (f"{STREAM}made = Stream('counts')\nnext(iter(made))", ""),
    "stream, draws": (f"{STREAM}made = Stream('draws')", ""),
    "stream within another, told": (
        f"{STREAM}{WITHIN}told = Stream('told')\nmade = Within(told)",
        "told.set_epoch(epoch)",
    ),
    "stream within another, draws": (f"{STREAM}{WITHIN}made = Within(Stream('draws'))", ""),
}


def written(tmp_path, beginning, text):
    """The command of a script with these loops."""
    path = tmp_path / "script.py"
    path.write_text(f"{beginning}number, order = 0, []\n{text}\n")
    return Command(str(path))


def read_by(tmp_path, command, workers, count, skipped=0):
    """What a job reads: the first column of the inputs."""
    job = {"script": {"file": command.file}, "training": {"batch_size": 8, "steps": 1}}
    job["data"] = {"workers": workers}
    (tmp_path / "job.yaml").write_text(json.dumps(job))
    loader = training_loader(load(tmp_path / "job.yaml"), Parts.of(command))
    loader.example(8)  # as where the model is captured
    batches = loader.micro_batches(islice(loader.batches(), count), 4, skipped)
    return torch.cat([inputs["0"][:, 0] for inputs, _ in batches])


@pytest.mark.parametrize(
    ("kind", "processes", "stays"),
    [
        *((kind, 0, False) for kind in KINDS),
        *((kind, 1, True) for kind in ("told from 5", "stream, told", "stream, counts")),
        *((kind, 1, False) for kind in ("told", "stream, told", "stream, draws")),
    ],
)
def test_epochs_of_a_job_have_the_samples_of_the_script(
    found_in, beginning, tmp_path, kind, processes, stays
):
    """With other processes that load, too, and if a run goes on."""
    made, before = KINDS[kind]
    text = EPOCHS.format(
        made=made, before=before or "pass", step=STEP, processes=processes, stays=stays
    )
    command = written(tmp_path, beginning, text)
    space: dict[str, list[torch.Tensor]] = {}
    exec((tmp_path / "script.py").read_text(), space)
    wanted = torch.cat(space["order"])
    assert [each.what for each in found_in(command).differs] == []
    for workers in (0, 1):
        assert torch.equal(read_by(tmp_path, command, workers, 12), wanted)
    assert torch.equal(read_by(tmp_path, command, processes, 12, 6), wanted[48:])


LOADERS = {
    "shuffles a list of its own": (
        "import random\nrandom.seed(3)\nclass Batches:\n"
        "    def __init__(self): self.indices = [*range(32)]\n"
        "    def __len__(self): return 4\n    def __iter__(self):\n"
        "        random.shuffle(self.indices)\n"
        "        return (self.indices[i : i + 8] for i in range(0, 32, 8))\n"
        "made = DataLoader(data, batch_sampler=Batches())"
    ),
    "has a generator of its own": (
        "import random\nclass Samples(torch.utils.data.Sampler):\n"
        "    def __init__(self): self.random = random.Random(3)\n"
        "    def __len__(self): return 32\n"
        "    def __iter__(self): return iter(self.random.sample(range(32), 32))\n"
        "made = DataLoader(data, batch_size=8, sampler=Samples())"
    ),
    "is told": (
        "from torch.utils.data.distributed import DistributedSampler\n"
        "told = DistributedSampler(data, num_replicas=1, rank=0)\n"
        "made = DataLoader(data, batch_size=8, sampler=told)"
    ),
}
LOOP = """
for epoch in range(3):
    {before}
    for x, y in made:
        order.append(x[:, 0])
        {step}
"""


@pytest.mark.parametrize("name", LOADERS)
def test_what_a_sampler_keeps_is_as_it_was_when_its_epochs_are_drawn(
    found_in, beginning, tmp_path, name
):
    before = "told.set_epoch(epoch)" if name == "is told" else "pass"
    command = written(tmp_path, beginning, LOADERS[name] + LOOP.format(before=before, step=STEP))
    space: dict[str, list[torch.Tensor]] = {}
    exec((tmp_path / "script.py").read_text(), space)
    assert torch.equal(read_by(tmp_path, command, 0, 12), torch.cat(space["order"]))
    assert [each.what for each in found_in(command).differs] == []


BY_HAND = "{kind}made = {made}\nmade = DataLoader(made, batch_size=8)" + LOOP
OTHERS = {
    "a sampler goes on where it was": (
        "class Samples(torch.utils.data.Sampler):\n"
        "    def __init__(self): self.indices = iter(torch.randperm(960).tolist())\n"
        "    def __len__(self): return 32\n"
        "    def __iter__(self): return (next(self.indices) % 32 for _ in range(32))\n"
        "made = DataLoader(data, batch_size=8, sampler=Samples())"
        + LOOP.format(before="pass", step=STEP),
        ["samples"],
        "the sampler (Samples) the same indices",
    ),
    "an attribute of a stream by hand": (
        BY_HAND.format(
            kind=STREAM, made="told = Stream('told')", before="told.epoch = epoch", step=STEP
        ),
        ["order"],
        "changes what its dataset gives",
    ),
    "a stream draws": (
        BY_HAND.format(
            kind="class Rows(torch.utils.data.IterableDataset):\n    def __len__(self): return 32\n"
            "    def __iter__(self): return (data[i] for i in torch.randperm(32).tolist())\n",
            made="Rows()",
            before="pass",
            step=STEP,
        ),
        ["random numbers"],
        "the order of a stream",
    ),
    "dropout": (
        "drop, made = nn.Dropout(0.5), loader"
        + LOOP.format(before="pass", step=STEP.replace("model(x)", "model(drop(x))")),
        ["random numbers", "order"],
        "it draws random numbers in its steps",
    ),
    "dropout, and data as they are": (
        "drop, made = nn.Dropout(0.5), DataLoader(data, batch_size=8)"
        + LOOP.format(before="pass", step=STEP.replace("model(x)", "model(drop(x))")),
        ["random numbers"],
        "follow from training.seed",
    ),
    "evaluations that draw": (
        "drop, made, held = nn.Dropout(0.5), loader, DataLoader(data, batch_size=2)"
        + LOOP.format(before="[drop(model(x)) for x, y in held if epoch]", step=STEP),
        ["order"],
        "steps or evaluations",
    ),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_samples_of_later_epochs_are_named_with_their_cause(
    found_in, beginning, tmp_path, name
):
    text, kinds, words = OTHERS[name]
    found = found_in(written(tmp_path, beginning, text))
    assert [each.what for each in found.differs] == kinds
    assert words in found.differs[-1].value


ACCUMULATES = """
data = TensorDataset(torch.randn({count}, 4), torch.randint(0, 3, ({count},)))
loader = DataLoader(data, batch_size=8, drop_last={drops})
criterion = nn.CrossEntropyLoss(reduction="{reduction}")
for epoch in range(2):
    for i, (x, y) in enumerate(loader):
        criterion(model(x), y).backward()
        if (i + 1) % 2 == 0 or i + 1 == len(loader):
            optimizer.step(); optimizer.zero_grad()
"""
SHORT = "the last batch of an epoch has 3 samples: in its step each sample has the same weight"


@pytest.mark.parametrize(
    ("count", "drops", "reduction", "is_named"),
    [
        (27, False, "mean", True),
        (27, True, "mean", False),
        (32, False, "mean", False),
        (19, False, "mean", False),
        (27, False, "sum", False),
    ],
    ids=["with another", "dropped", "full", "alone", "a sum"],
)
def test_a_short_batch_that_a_step_accumulates_with_others_is_named(
    found_in, beginning, tmp_path, count, drops, reduction, is_named
):
    text = ACCUMULATES.format(count=count, drops=drops, reduction=reduction)
    differs = found_in(written(tmp_path, beginning, text)).differs
    assert any(SHORT in each.value for each in differs) == is_named


@pytest.mark.timeout(200)
@pytest.mark.parametrize("processes", [0, 1])
def test_an_epoch_of_a_stream_that_waits_for_data_is_not_waited_for(
    found_in, beginning, tmp_path, monkeypatch, processes
):
    """It waits in a system call, which no other thread could interrupt."""
    monkeypatch.setattr(read_again, "_PATIENCE_S", 1.0)
    text = (
        "import os\nreading, writing = os.pipe()\n"
        "class Rows(torch.utils.data.IterableDataset):\n"
        "    def __iter__(self):\n        yield from (data[i % 32] for i in range(80))\n"
        "        os.read(reading, 1)\n"
        f"made = DataLoader(Rows(), batch_size=8, num_workers={processes})"
    )
    found = found_in(written(tmp_path, beginning, text + LOOP.format(before="pass", step=STEP)))
    words = next(each.value for each in found.differs if each.what == "batches")
    assert words.startswith("if the samples of an epoch are no multiple of 8")


def test_a_set_epoch_in_c_tells_the_number_of_the_epoch_by_its_first_argument():
    owner = {}
    assert Told.of(dict.update, owner, (3, 1), {}) == Told(owner, (3, 1), {}, 0)


def test_orders_of_large_datasets_take_eight_bytes_a_sample():
    loader = DataLoader(range(200_000), batch_size=1000)
    tracemalloc.start()
    try:
        assert Order(loader, Generators(loader))(0)[-1] == 199_999
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 3 * 8 * 200_000


@pytest.mark.parametrize(
    ("count", "drops", "kinds"),
    [(22, False, ["steps", "batches"]), (22, True, ["steps"]), (24, False, ["steps"])],
)
def test_a_stream_whose_epochs_end_within_a_step_is_named(
    found_in, beginning, tmp_path, count, drops, kinds
):
    text = (
        "class Rows(torch.utils.data.IterableDataset):\n"
        f"    def __iter__(self): return (data[i] for i in range({count}))\n"
        f"made = DataLoader(Rows(), batch_size=8, drop_last={drops})"
    )
    text += LOOP.format(before="pass", step=STEP)
    found = found_in(written(tmp_path, beginning, text))
    assert [each.what for each in found.differs] == kinds
    if len(kinds) > 1:
        assert found.differs[-1].value.startswith("an epoch ends with 6 samples that fill no step")


VALIDATE = """
held_out = DataLoader(data, batch_size=8)
def save(): torch.save({{}}, "model.pt")
def validate(val_loader):
    for x, y in val_loader: model(x)
for epoch in range(4):
    for x, y in loader:
        {step}
        {often}
    {after}
"""


@pytest.mark.parametrize(
    ("often", "after", "line"),
    [
        ("", "if epoch % 2 == 1: [model(x) for x, y in held_out]", "if epoch"),
        ("", "if epoch % 2 == 0: continue\n    validate(held_out)", "validate(held_out)"),
        ("", "if (epoch + 1) % 3 == 0: validate(DataLoader(data))", "if (epoch"),
        ("if number % 9 == 8: torch.randn(3)\n        number += 1", "", "if number"),
        ("", "if epoch % 2 == 1: save()", ""),
        ("if number: loader.dataset\n        number += 1", "if epoch == 3: print(len(loader))", ""),
    ],
)
def test_what_may_draw_in_some_epochs_only_is_named(
    found_in, beginning, tmp_path, often, after, line
):
    text = VALIDATE.format(step=STEP, often=often, after=after)
    found = found_in(written(tmp_path, beginning, text))
    named = [each.place[1] for each in found.differs if each.what == "order"]
    lines = (tmp_path / "script.py").read_text().splitlines()
    assert [lines[each - 1].strip()[: len(line)] for each in named] == ([line] if line else [])


def test_order_that_follows_a_generator_of_its_own_is_as_in_the_script(
    found_in, beginning, tmp_path
):
    text = (
        "own = torch.Generator().manual_seed(1)\n"
        "loader = DataLoader(data, batch_size=8, shuffle=True, generator=own)\n"
    )
    text += VALIDATE.format(step=STEP, often="", after="if epoch % 2: validate(held_out)")
    assert found_in(written(tmp_path, beginning, text)).differs == []


def test_an_evaluation_after_a_single_epoch_is_named(found_in, beginning, tmp_path):
    text = (
        "held_out = DataLoader(TensorDataset(*data.tensors), batch_size=8)\n"
        f"for x, y in loader:\n    {STEP}\nfor x, y in held_out: model(x)"
    )
    found = found_in(written(tmp_path, beginning, text))
    (named,) = [each for each in found.left if each.what == "evaluation"]
    assert "{data: {factory: script, kwargs: {loader: held_out}}, every: 4}" in named.value
