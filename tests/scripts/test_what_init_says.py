"""What a script trains besides the job, how its epochs are read, and which jobs init refuses."""

import re
from dataclasses import replace

import pytest
import torch

from pipectl.cli import main
from pipectl.errors import CaptureError
from pipectl.profiler import script_steps
from pipectl.script import Command, Parts
from pipectl.script.findings import findings_of
from pipectl.script.later import compare_steps
from pipectl.script.plain import own_losses
from pipectl.script.steps import steps_of
from pipectl.script.trainings import later_trainings
from pipectl.spec import load

FIT = """
def fit(model, rate, epochs):
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    for epoch in range(epochs):
        one_epoch(model, optimizer)
        if epoch % 2:
            continue
def one_epoch(model, optimizer):
    for x, y in loader:
        criterion(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    return float(criterion(model(x), y))
class Learner:
    def __init__(self, rate): self.rate = rate
    def run(self): fit(model, self.rate, 2)
def test(model):
    x, y = next(iter(loader))
    x.requires_grad_()
    criterion(model(x), y).backward()
    return x.grad.sign()
"""
LATER = {
    "another call": ("fit(model, 0.1, 2)\nfit(model, 0.01, 2)  # here", 1),
    "in a function": (
        "def main():\n    fit(model, 0.1, 2)\n    fit(model, 0.01, 2)  # here\nmain()",
        1,
    ),
    "a loop below": (
        "fit(model, 0.1, 2)\nslow = torch.optim.SGD(model.parameters(), lr=0.01)\n"
        "for x, y in loader:\n    criterion(model(x), y).backward()\n"
        "    slow.step()  # not the line: the statement that does both is",
        0,
    ),
    "of objects": ("Learner(0.1).run()\nlearner = Learner(0.01)\nlearner.run()  # here", 1),
    "within an if": (
        "if True:\n    fit(model, 0.1, 2)\nelse:\n    fit(model, 1.0, 1)\n"
        "if len(loader):\n    fit(model, 0.01, 1)  # here",
        1,
    ),
    "none": ("fit(model, 0.1, 2)\nmodel.train()\nmodel.eval()\ntest(model)", 0),
    "none on one line": ("def main(): rate = 0.1; fit(model, rate, 2)\nmain()", 0),
    "none in the next epoch": (
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\nfor epoch in range(3):\n"
        "    one_epoch(model, optimizer)\n    one_epoch(model, optimizer)\n    test(model)",
        0,
    ),
    "of a library": (
        "class Trainer:\n    def __init__(self, model): pass\n"
        "fit(model, 0.1, 2)\ntrainer = Trainer(model)\ntrainer.train()  # here",
        1,
    ),
}
"""Scripts, and how many of the marked lines train once the job's training is over."""


def written(tmp_path, beginning, text):
    path = tmp_path / "script.py"
    path.write_text(f"{beginning}{text}\n")
    return Command(str(path))


def lines_of(tmp_path, places):
    lines = (tmp_path / "script.py").read_text().splitlines()
    return [lines[line - 1] for _, line in places]


@pytest.mark.parametrize("name", [name for name in LATER if name != "a loop below"])
def test_what_trains_after_the_jobs_training_is_named(beginning, tmp_path, name):
    text, count = LATER[name]
    parts = Parts.of(written(tmp_path, beginning, FIT + text))
    made = parts.seen.made_by[id(parts.optimizer)]
    found = lines_of(tmp_path, later_trainings(parts.seen.frames, made))
    assert len(found) == count
    assert all("# here" in line for line in found)


def test_init_says_that_the_job_is_the_first_training(found_in, beginning, tmp_path):
    text, _ = LATER["a loop below"]
    found = found_in(written(tmp_path, beginning, FIT + text))
    (named,) = [each for each in found.left if each.what == "a later training"]
    assert lines_of(tmp_path, [named.place]) == ["for x, y in loader:"]
    assert "the job is the first training alone" in named.value


def test_epochs_of_a_loader_that_cycle_repeats_are_the_first_one(beginning, tmp_path):
    text = (
        "from itertools import cycle\nbatches = cycle(loader)\nfor number in range(9):\n"
        "    x, y = next(batches)\n    criterion(model(x), y).backward()\n    optimizer.step()"
    )
    data = Parts.of(written(tmp_path, beginning, text)).dataset()
    assert [*data.order(0)] == [*data.order(1)] == [*data.order(5)]
    text = text.replace("cycle(loader)", "iter(loader)")
    data = Parts.of(written(tmp_path, beginning, text)).dataset()
    assert [*data.order(0)] != [*data.order(1)]


@pytest.mark.parametrize(
    "held",
    [
        "range(20)",
        "type('Bar', (), dict(iterable=range(20), __iter__=lambda s: iter(s.iterable)))()",
        # As click.progressbar(range(20)) gives.
        "type('B', (), dict(__module__='click.', length=20, __iter__=lambda s: iter(range(20))))()",
    ],
)
def test_steps_of_a_range_that_a_variable_holds_are_counted(beginning, tmp_path, held):
    text = (
        f"steps = {held}\nbatches = iter(loader)\nfor number in steps:\n    try:\n"
        "        x, y = next(batches)\n    except StopIteration:\n"
        "        batches = iter(loader)\n        x, y = next(batches)\n"
        "    criterion(model(x), y).backward()\n    optimizer.step()"
    )
    known = steps_of(Parts.of(written(tmp_path, beginning, text)))
    assert known is not None
    assert known[0] == 20


def test_a_sampler_of_batches_need_not_say_their_size(beginning, tmp_path):
    text = (
        "class Buckets(torch.utils.data.Sampler):\n    def __init__(self): pass\n"
        "    def __len__(self): return 4\n"
        "    def __iter__(self):\n"
        "        for part in torch.randperm(32).split(8): yield part.tolist()\n"
        "for x, y in DataLoader(data, batch_sampler=Buckets()):\n"
        "    criterion(model(x), y).backward()\n    optimizer.step()"
    )
    parts = Parts.of(written(tmp_path, beginning, text))
    assert parts.batch_size == 8
    assert sorted(parts.dataset().order(1)) == [*range(32)]


def test_a_script_by_itself_computes_on_the_cpu_too(beginning, tmp_path):
    text = (
        "model.to('cuda')\nfor x, y in loader:\n"
        "    criterion(model(x.cuda()), y.to('cuda:0')).backward()\n    optimizer.step()"
    )
    assert len(own_losses(written(tmp_path, beginning, text), 2)) == 2


EPOCHS = (
    "held_out = DataLoader(data, batch_size=8)\nfor epoch in range(3):\n    for x, y in loader:\n"
    "        read.append(x[:, 0])\n"
    "        criterion(model(x), y).backward()\n        optimizer.step()\n"
    "        optimizer.zero_grad()\n"
)
EVALUATION = "    with torch.no_grad():\n        for x, y in held_out: criterion(model(x), y)\n"


OWN = "own = torch.Generator().manual_seed(5)\n"
STAYS = "num_workers=1, persistent_workers=True"


@pytest.mark.parametrize("more", ["", EVALUATION, EVALUATION + EVALUATION])
@pytest.mark.parametrize(
    ("options", "others"),
    [
        ("", ""),
        ("generator=own", ""),
        ("generator=own", "generator=own"),
        (STAYS, ""),
        (f"generator=own, {STAYS}", "generator=own"),
    ],
    ids=["shared", "own", "own of both", "processes stay", "own, and processes stay"],
)
def test_later_epochs_have_the_scripts_order_whatever_it_reads_in_between(
    beginning, tmp_path, more, options, others
):
    """To read other data draws random numbers, too."""
    text = EPOCHS.replace("batch_size=8)", f"batch_size=8, {others})")
    text = f"{OWN}loader = DataLoader(data, 8, shuffle=True, {options})\n{text}"
    command = written(tmp_path, beginning, f"read = []\n{text}{more}")
    compared = compare_steps(command)
    is_counted = bool(more) and ("own" in options) == ("own" in others)
    assert (compared.drawn_between_epochs > 0) == is_counted
    assert not compared.reorders
    space: dict[str, list[torch.Tensor]] = {}
    exec((tmp_path / "script.py").read_text(), space)
    wanted = torch.cat(space["read"]).reshape(3, 32)
    command = replace(command, drawn_between_epochs=compared.drawn_between_epochs)
    data = Parts.of(command).dataset()
    for epoch in (0, 2, 1):
        assert [float(data[i][0][0]) for i in data.order(epoch)] == wanted[epoch].tolist()


def test_a_second_epoch_that_could_not_be_compared_is_named(found_in, beginning, tmp_path):
    """Between epochs this script writes, where it is stopped, and reads other data."""
    text = f"read = []\n{EPOCHS}{EVALUATION}    open('log', 'w').close()\n"
    (found,) = found_in(written(tmp_path, beginning, text)).differs
    assert (found.what, "its second epoch could not be" in found.value) == ("order", True)


def test_what_is_drawn_only_once_is_named(found_in, beginning, tmp_path):
    text = EPOCHS.replace("batch_size=8)", f"batch_size=8, {STAYS})")
    (found,) = found_in(written(tmp_path, beginning, f"read = []\n{text}{EVALUATION}")).differs
    assert (found.what, "persistent_workers" in found.value) == ("order", True)


def test_another_order_of_later_epochs_is_named(found_in, beginning, tmp_path):
    text = f"read = []\n{EPOCHS}    torch.randn(3)\n"
    found = found_in(written(tmp_path, beginning, text))
    assert [each.what for each in found.differs] == ["order"]


def test_a_loader_that_every_epoch_makes_is_no_evaluation(beginning, tmp_path):
    text = "read = []\n" + EPOCHS.replace("in loader:", "in DataLoader(data, 8, shuffle=True):")
    assert compare_steps(written(tmp_path, beginning, text)).evaluated == ()


SCHEDULE = "follower = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)\n"


@pytest.mark.parametrize("value", ["total / len(loader)", "total", "loss", "total * 8 / len(data)"])
def test_a_schedule_that_follows_the_loss_of_training_is_refused(
    found_in, beginning, tmp_path, value
):
    text = (
        f"{SCHEDULE}for epoch in range(3):\n    total = 0.0\n    for x, y in loader:\n"
        "        optimizer.zero_grad()\n        loss = criterion(model(x), y)\n"
        "        loss.backward()\n        optimizer.step()\n        total += loss.item()\n"
        f"    with torch.no_grad():\n        for x, y in DataLoader(data, 8): model(x)\n"
        f"    follower.step({value})  # here"
    )
    with pytest.raises(CaptureError, match="follows the loss of training") as caught:
        found_in(written(tmp_path, beginning, text))
    line = text[: text.index("# here")].count("\n") + beginning.count("\n") + 1
    assert f"script.py:{line}: " in str(caught.value)


PACKED = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn, self.out = nn.LSTM(1, 4, batch_first=True), nn.Linear(4, 3)
    def forward(self, x, lengths):
        packed = nn.utils.rnn.pack_padded_sequence(
            x[:, :, None], lengths.cpu(), batch_first=True, enforce_sorted=False
        )
        return self.out(self.rnn(packed)[1][0][-1])
model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for x, y in loader:
    criterion(model(x, y + 1), y).backward()
    optimizer.step()
    optimizer.zero_grad()
"""
PADDED = """
def padded(samples):
    x, y = torch.utils.data.default_collate(samples)
    return nn.functional.pad(x, (0, int(y.max()))), y
for x, y in DataLoader(data, batch_size=2, collate_fn=padded):
    criterion(model(x[:, :4]), y).backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (PACKED, r"script.py:\d+: .* it packs sequences"),
        (PADDED, r"script.py:\d+: 0 is .*, and a job has one shape"),
        (
            "read = []\n" + SCHEDULE + EPOCHS,
            r"script.py:\d+: ReduceLROnPlateau needs the loss of evaluations",
        ),
        (
            "read = []\n"
            + SCHEDULE.replace("optimizer)", "optimizer, 'max')")
            + EPOCHS
            + EVALUATION,
            r"script.py:\d+: this schedule follows a metric that rises",
        ),
    ],
    ids=["packed", "padded", "schedule", "a metric that rises"],
)
def test_init_refuses_what_no_rank_could_train(
    capfd, monkeypatch, beginning, tmp_path, text, words
):
    """The job is written all the same, so that its keys can be changed; what shells have expanded
    stays as it is."""
    monkeypatch.setattr(script_steps, "compare_in_process", compare_steps)
    directory = tmp_path / "$work"
    directory.mkdir()
    monkeypatch.chdir(directory)
    command = written(directory, beginning, text)
    arguments = ["--script", command.file, "--scheduler", "local", "--", "$other", "~/x"]
    assert main(["init", "run", *arguments]) == 3
    assert re.search(words, capfd.readouterr().err)
    job = load(directory / "run" / "job.yaml", sites=[])
    assert (job.script.file, job.script.arguments) == (command.file, ("$other", "~/x"))


def test_batches_that_must_stay_whole_do_in_the_job(beginning, tmp_path):
    text = (
        "for x, y in loader:\n    z = model(x)\n"
        "    loss = (z @ z.T - torch.eye(len(z))).pow(2).mean()\n"
        "    loss.backward()\n    optimizer.step()\n    optimizer.zero_grad()"
    )
    command = written(tmp_path, beginning, text)
    assert findings_of(Parts.of(command), compare_steps(command)).micro_batches == 1


DATA = "from torch.utils.data import Subset\nmade, epoch = data, 0\n{}\nfor epoch in range(3):\n"
DATA += "    {}\n    for x, y in {}:  # here\n        criterion(model(x), y).backward()\n"
DATA += "        optimizer.step()\n        optimizer.zero_grad()\n"
CHANGES = (
    "class Changes(torch.utils.data.Dataset):\n    def __len__(self): return 32\n"
    "    def draw(self): self.scale = torch.rand(())\n"
    "    def __getitem__(self, i): return data[i][0] * self.scale, data[i][1]\nmade = Changes()\n"
    "loader = DataLoader(made, batch_size=8)"
)
PARTS = "parts = torch.randperm(32).split(16)"
OTHER_DATA = {
    "more": ("", "", "DataLoader(Subset(data, range(8 + 8 * epoch)), 8)", "has 16 samples, and "),
    "larger batches": ("", "", "DataLoader(data, 8 + 8 * epoch)", "has 16 samples in a batch"),
    "fewer batches": ("data = Subset(data, range(30))", "",
                      "DataLoader(data, 8, drop_last=epoch > 0)",
                      "has 3 batches, and the first one 4"),
    "another part": (PARTS, "", "DataLoader(Subset(data, parts[epoch % 2].tolist()), 8)",
                     "has other samples of the same dataset"),
    "another part by a sampler": (
        PARTS, "", "DataLoader(data, 8, "
        "sampler=torch.utils.data.SubsetRandomSampler(parts[epoch % 2].tolist()))",
        "has other samples of the same dataset"),
    "another dataset": ("", "made = TensorDataset(torch.randn(32, 4), data.tensors[1])",
                        "DataLoader(made, 8)", "has another dataset"),
    "a dataset that changes": (CHANGES, "made.draw()", "loader", "has a dataset that has changed"),
}  # fmt: skip
SAME_DATA = {
    "a new loader": ("", "", "DataLoader(data, 8, shuffle=True)"),
    "a new dataset": ("", "made = TensorDataset(*data.tensors)", "DataLoader(made, 8)"),
    "the same part": ("", "made = Subset(data, [*range(16)][:: 1 - 2 * (epoch > 1)])",
                      "DataLoader(made, 8)"),
    "drawn again and again": (
        "some = torch.utils.data.WeightedRandomSampler(torch.rand(32), 32)\n"
        "loader = DataLoader(data, batch_size=8, sampler=some)", "", "loader"),
}  # fmt: skip


@pytest.mark.parametrize("name", OTHER_DATA)
def test_epochs_with_other_data_are_refused(beginning, tmp_path, name):
    *text, words = OTHER_DATA[name]
    command = written(tmp_path, beginning, DATA.format(text[0], text[1] or "pass", text[2]))
    with pytest.raises(CaptureError, match=f"another epoch {words}") as caught:
        compare_steps(command)
    line = int(re.search(r"script.py:(\d+): ", str(caught.value))[1])
    assert "# here" in (tmp_path / "script.py").read_text().splitlines()[line - 1]


@pytest.mark.parametrize("name", SAME_DATA)
def test_epochs_with_the_same_data_are_not_refused(beginning, tmp_path, name):
    text = SAME_DATA[name]
    command = written(tmp_path, beginning, DATA.format(text[0], text[1] or "pass", text[2]))
    assert compare_steps(command).epochs == 2
