"""Training scripts as they are written for plain PyTorch, unchanged, as the source of a job."""

import json
import re
from contextlib import contextmanager
from multiprocessing import Pipe
from pathlib import Path

import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.data import DataLoader

from pipectl.capture import CapturedJob
from pipectl.capture.build import evaluation_loader, parts_of_script
from pipectl.cli.from_script import take_script
from pipectl.errors import CaptureError
from pipectl.profile_parts import MeasuredOn
from pipectl.profiler import profile_job, script_steps
from pipectl.runs import read_metrics
from pipectl.runtime import plain
from pipectl.script import Command, Parts
from pipectl.script.findings import findings_of
from pipectl.script.halves import Kind, kind_of_loss
from pipectl.script.later import compare_steps
from pipectl.script.order import Generators, Order
from pipectl.script.plain import own_losses
from pipectl.spec import load

HERE = Path(__file__).parent
PACKAGES = {
    "digits_cnn": "torch",
    "gpt_on_characters": "torch",
    "windows_of_text": "torch",
    "amp_accumulation": "torch",
    "groups_warmup_cosine": "torch",
    "unet_mixed_losses": "torch",
    "seq2seq_teacher_forcing": "torch",
    "hf_trainer_lm": "transformers",
    "hf_trainer_lora": "peft",
    "accelerate_loop": "accelerate",
    "lightning_module": "lightning",
    "sft_trl": "trl",
}
"""The scripts, and what each needs."""
MORE = {
    "graphs_in_batches": "torch",
    "trainer_class": "torch",
    "micro_steps": "torch",
    "own_fitter": "torch",
    "t5_lora_loop": "peft",
}
NAMES = [*PACKAGES, *(pytest.param(name, marks=pytest.mark.product) for name in MORE)]
WHOLE = {"digits_cnn", "amp_accumulation"}
"""Scripts whose batches are not divided: a batch norm computes with the samples of a micro-batch,
and gradients in 16 bits are rounded by micro-batches."""
ON_RANKS = {"amp_accumulation", "groups_warmup_cosine"}
"""Of those that need torch alone, the scripts that every run of the tests trains over ranks."""
STEPS = 5


@pytest.fixture
def job_of(tmp_path, monkeypatch):
    """``job_of("digits_cnn.py")``: the spec of a job of a script, as ``init`` writes it, and the
    number of batches of a step."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")

    def make(file, *arguments, **training):
        command = Command(str(HERE / file), arguments, str(tmp_path))
        compared = compare_steps(command)
        assert not compared.reason
        parts = Parts.of(command)
        found = findings_of(parts, compared)
        job = {
            "script": {
                "file": str(HERE / file),
                "arguments": list(arguments),
                "directory": str(tmp_path),
                "drawn_between_epochs": found.drawn_between_epochs,
            },
            "training": {**found.training, "steps": STEPS, **training},
            "data": found.data,
        }
        path = tmp_path / "job.yaml"
        path.write_text(json.dumps(job))
        return load(path), parts.accumulation

    return make


@pytest.mark.parametrize("name", NAMES)
def test_a_script_trains_as_by_itself(job_of, tmp_path, monkeypatch, name):
    """The model's graph is captured, too; that pipelines train what it says is held elsewhere."""
    pytest.importorskip({**PACKAGES, **MORE}[name])
    monkeypatch.chdir(tmp_path)
    spec, accumulated = job_of(f"{name}.py")
    own = own_losses(Command.of(spec), STEPS)
    plain.train(spec, spec.training.batch_size // accumulated, tmp_path)
    losses = json.loads((tmp_path / plain.LOSSES).read_text())["losses"]
    assert losses == pytest.approx(own, rel=1e-6)
    assert CapturedJob(spec).training_graph(2).operators


@pytest.mark.mpi
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(n, marks=[] if n in ON_RANKS else [pytest.mark.product])
        for n in (*PACKAGES, *MORE)
    ],
)
def test_a_script_trains_on_two_ranks_as_by_itself(job_of, tmp_path, run_in, train, name):
    pytest.importorskip({**PACKAGES, **MORE}[name])
    spec, accumulated = job_of(f"{name}.py")
    count = accumulated if name in WHOLE else 2 * accumulated
    spec = spec.model_copy(
        update={
            "pipeline": spec.pipeline.model_copy(update={"stages": 2, "micro_batches": count}),
            "resources": spec.resources.model_copy(update={"tasks_per_node": 2}),
        }
    )
    run = run_in(tmp_path / "runs", spec)
    train(run)
    losses = [line.loss for line in read_metrics(run) if line.is_step]
    assert losses == pytest.approx(own_losses(Command.of(spec), STEPS), rel=1e-5)


def test_batches_without_a_loader_are_refused_with_the_way_to_wrap_them():
    with pytest.raises(CaptureError, match=r"batch_of_windows.py:\d+: .*no DataLoader") as caught:
        Parts.of(Command(str(HERE / "batch_of_windows.py")))
    assert "class Windows(torch.utils.data.Dataset)" in str(caught.value)


@contextmanager
def patched_step(tell):
    """Tell a function of optimizers that are about to step."""
    handle = register_optimizer_step_pre_hook(lambda optimizer, *_: tell(optimizer))
    try:
        yield
    finally:
        handle.remove()


def test_what_cannot_be_followed_is_refused_with_its_line(found_in, refused, tmp_path):
    path = tmp_path / "refused.py"
    path.write_text(refused.script)
    with pytest.raises(CaptureError) as caught:
        found_in(Command(str(path)))
    line = next(n for n, text in enumerate(refused.script.splitlines(), 1) if "# here" in text)
    assert f"refused.py:{line}" in str(caught.value)
    assert refused.words in str(caught.value)


def test_what_steps_do_alike_is_not_refused(followed, tmp_path):
    path = tmp_path / "followed.py"
    path.write_text(followed.script)
    compared = compare_steps(Command(str(path), directory=str(tmp_path)))
    assert compared.reason == followed.words
    assert [file.name for file in tmp_path.iterdir()] == ["followed.py"]


def test_init_compares_steps_in_another_process(annealed, tmp_path):
    """Where the loader of a script without ``if __name__`` starts processes as in the script."""
    path = tmp_path / "annealed.py"
    path.write_text(annealed.script.replace("shuffle=True", "shuffle=True, num_workers=1"))
    with pytest.raises(CaptureError, match=r"annealed.py:\d+: mul reads 0.01 in step 2") as caught:
        take_script(path, [], tmp_path)
    assert "a loss of its own" in caught.value.hint


def test_what_the_process_that_compares_raises_is_said(monkeypatch):
    def fail(*_, **__):
        raise KeyError("counter")

    monkeypatch.setattr(script_steps, "compare_steps", fail)
    monkeypatch.setattr(script_steps, "begin_apart", lambda: None)
    receiving, sending = Pipe(duplex=False)
    script_steps._compare(Command("no.py"), False, None, sending)
    assert "were compared with the script: KeyError: 'counter'" in receiving.recv().sentence


def test_profiles_compare_steps_unless_the_loss_is_the_jobs_own(annealed, tmp_path, monkeypatch):
    monkeypatch.setattr(script_steps, "compare_in_process", compare_steps)
    path = tmp_path / "annealed.py"
    path.write_text(annealed.script)
    job = {"script": {"file": str(path)}, "training": {"batch_size": 8, "steps": 2}}
    (tmp_path / "job.yaml").write_text(json.dumps(job))
    with pytest.raises(CaptureError, match="mul reads"):
        profile_job(load(tmp_path / "job.yaml"), MeasuredOn("cpu"))
    job["loss"] = {"factory": "torch.nn.functional:cross_entropy"}
    (tmp_path / "job.yaml").write_text(json.dumps(job))
    assert script_steps.compare_script(load(tmp_path / "job.yaml")) is None


def test_the_order_of_any_epoch_is_that_of_the_loader_and_few_are_kept():
    torch.manual_seed(3)
    loader = DataLoader(range(5), batch_size=2, shuffle=True)
    start = Generators(loader)
    wanted = [[i for batch in loader for i in batch.tolist()] for _ in range(40)]
    torch.manual_seed(4)
    order = Order(loader, start)
    for epoch in (0, 39, 38, 1, 2, 20, 0, 5, 39):
        assert [*order(epoch)] == wanted[epoch]
    assert len(order._epochs) < 40
    torch.manual_seed(4)
    drawn = torch.rand(3)
    torch.manual_seed(4)
    order(7)
    assert torch.equal(torch.rand(3), drawn)


def test_a_backward_within_a_closure_of_the_optimizer_counts(closures, tmp_path):
    path = tmp_path / "closures.py"
    path.write_text(closures.script)
    assert Parts.of(Command(str(path))).accumulation == 2


@pytest.mark.parametrize(("over", "kind"), [("", Kind.SUM), (" / len(x)", Kind.MEAN)])
def test_a_second_epoch_is_looked_at_and_sums_are_told_from_means(epochs, tmp_path, over, kind):
    path = tmp_path / "epochs.py"
    path.write_text(epochs.format(over=over))
    command = Command(str(path))
    compared, parts = compare_steps(command), Parts.of(command)
    assert "and of the first one of a second epoch" in compared.sentence
    assert kind_of_loss(parts) is kind
    assert findings_of(parts, compared).loss == ({"weight": "sum"} if kind is Kind.SUM else {})


def test_each_schedule_steps_as_in_the_script(epochs, tmp_path):
    path = tmp_path / "epochs.py"
    path.write_text(epochs.format(over="").replace("assert", "pass; "))
    parts, own = Parts.of(Command(str(path))), []
    optimizer = parts.make_optimizer(parts.originals)
    schedules = parts.make_schedules(optimizer)
    with patched_step(lambda each: own.append(each.param_groups[0]["lr"])):
        own_losses(parts.command, 30)
    for rate in own:
        assert optimizer.param_groups[0]["lr"] == pytest.approx(rate)
        schedules.step()


@pytest.mark.parametrize(
    ("batches", "words"),
    [
        ("[[0, 1], [2], [3, 4]]", "gives a batch of 1 sample,.*, 2 by the batch_size"),
        ("[[0, 1, 2], [3, 4, 5]]", "gives a batch of 3 samples,"),
        ("[[0, 1], [2, 3, 4]]", "gives a batch of 3 samples,"),
        ("[[0], [1], [2]]", "gives a batch of 1 sample,"),
        ("[[0, 1]] * next(NUMBERS)", "gives 4 samples in epoch 2, and 2 in the first one"),
    ],
)
def test_batches_and_epochs_of_several_sizes_are_refused(tmp_path, batches, words):
    """A job would divide the samples in another way."""
    path = tmp_path / "sizes.py"
    path.write_text(
        "import torch\nfrom torch.utils.data import BatchSampler, DataLoader, TensorDataset\n"
        "NUMBERS = iter([1, 1, 2])\n"
        f"class Uneven(BatchSampler):\n    def __iter__(self): yield from {batches}\n"
        "data = TensorDataset(torch.randn(6, 2))\nmodel = torch.nn.Linear(2, 1)\n"
        "optimizer = torch.optim.SGD(model.parameters(), 0.1)\n"
        "for (x,) in DataLoader(data, batch_sampler=Uneven(range(5), 2, False)):\n"
        "    model(x).mean().backward()\n    optimizer.step()\n"
    )
    dataset = Parts.of(Command(str(path))).dataset()
    with pytest.raises(CaptureError, match=words):
        [dataset.order(epoch) for epoch in range(2)]


def test_what_a_script_evaluates_is_evaluated_and_its_schedule_follows(found_in, plateau, tmp_path):
    path = tmp_path / "plateau.py"
    path.write_text(plateau)
    command = Command(str(path))
    found = found_in(command)
    assert found.evaluation["data"]["kwargs"] == {"loader": "loaders['val']"}
    assert {"evaluation", "schedule"} <= {line.what for line in found.taken}
    job = {
        "script": {"file": str(path)},
        "training": found.training,
        "evaluation": found.evaluation,
    }
    (tmp_path / "job.yaml").write_text(json.dumps(job))
    spec, rates = load(tmp_path / "job.yaml"), []
    assert len(evaluation_loader(spec, parts_of_script(spec)).order(0)) == 8
    plain.train(spec, 16, tmp_path)
    losses = json.loads((tmp_path / plain.LOSSES).read_text())["losses"]
    with patched_step(lambda each: rates.append(each.param_groups[0]["lr"])):
        assert losses == pytest.approx(own_losses(command, 9), rel=1e-6)
    assert len(set(rates)) > 2
    job["evaluation"]["data"]["kwargs"]["loader"] = "nobody"
    (tmp_path / "job.yaml").write_text(json.dumps(job))
    spec = load(tmp_path / "job.yaml")
    with pytest.raises(CaptureError, match="has no DataLoader 'nobody'"):
        evaluation_loader(spec, parts_of_script(spec))


def test_batches_that_a_loop_skips_and_what_it_freezes_later_are_named(
    found_in, beginning, tmp_path
):
    path = tmp_path / "skips.py"
    path.write_text(
        f"{beginning}for epoch in range(3):\n"
        "    if epoch == 2:\n        model[0].weight.requires_grad = False\n"
        "    for number, (x, y) in enumerate(loader):\n"
        "        if number % 2:\n            continue\n"
        "        if number > 2:\n            break\n"
        "        for part in range(9):\n            if part: break\n"
        "        optimizer.zero_grad()\n        criterion(model(x), y).backward()\n"
        "        optimizer.step()\n"
    )
    command = Command(str(path))
    found = found_in(command)
    lines = path.read_text().splitlines()
    named = [lines[each.place[1] - 1].strip() for each in found.differs if each.place]
    assert [each for each in named if each in ("continue", "break")] == ["continue", "break"]
    assert "model[0].weight.requires_grad = False" in named


def test_rates_set_by_hand_are_those_of_a_job_without_its_own(refusals, tmp_path, monkeypatch):
    monkeypatch.setattr(script_steps, "compare_in_process", compare_steps)
    (tmp_path / "rates.py").write_text(refusals["rate set by hand"].script)
    job = {"script": {"file": "rates.py"}, "training": {"batch_size": 8, "steps": 2}}
    (tmp_path / "job.yaml").write_text(json.dumps(job))
    with pytest.raises(CaptureError, match="lr of the optimizer is"):
        script_steps.compare_script(load(tmp_path / "job.yaml"))
    job["lr_scheduler"] = {"factory": "torch.optim.lr_scheduler:ConstantLR"}
    (tmp_path / "job.yaml").write_text(json.dumps(job))
    compared = script_steps.compare_script(load(tmp_path / "job.yaml"))
    assert script_steps.uncompared_of(compared) == ()


def test_other_options_than_the_rate_are_set_as_their_refusal_says(
    found_in, refusals, tmp_path, monkeypatch
):
    """By a schedule of the user; the table says the rate of the first step."""
    path = tmp_path / "options.py"
    text = refusals["weight decay set by hand"].script
    path.write_text(text)
    with pytest.raises(CaptureError) as caught:
        found_in(Command(str(path)))
    assert caught.value.hint.startswith("let get_lr() of a schedule of your own set it")
    each, rates = re.findall(r"`(.+?)`", caught.value.hint)
    before, _, rest = text.partition("for epoch in range(1)")
    rest = rest.replace("    for g in optimizer.param_groups: g['weight_decay'] = step / 10", "")
    kind = "class Decay(torch.optim.lr_scheduler.LRScheduler):\n    def get_lr(self):\n"
    path.write_text(
        f"{before}values = [step / 10 for step in range(9)]\n{kind}        {each}\n"
        f"        {rates}\ndecay = Decay(optimizer)\noptimizer.param_groups[0]['lr'] = 0.05\n"
        f"for epoch in range(1){rest}        decay.step()\n"
    )
    command = Command(str(path))
    found = found_in(command)
    assert "SGD, lr 0.05 (initial_lr 0.1)" in [line.value for line in found.taken]
    job = {"script": {"file": str(path)}, "training": found.training}
    (tmp_path / "job.yaml").write_text(json.dumps(job))
    plain.train(load(tmp_path / "job.yaml"), 8, tmp_path)
    losses = json.loads((tmp_path / plain.LOSSES).read_text())["losses"]
    assert losses == pytest.approx(own_losses(command, 4), rel=1e-6)
