"""The models and data of configs/ work in a plain PyTorch loop, without pipectl."""

import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset

from pipectl.spec import load

MODELS = Path(__file__).parents[2] / "configs" / "models"


def _module(name: str) -> dict:
    """The globals of a file of configs/models, which is no package."""
    path = MODELS / f"{name}.py"
    variables: dict = {"__name__": name}
    exec(compile(path.read_text(encoding="utf-8"), path, "exec"), variables)
    return variables


@pytest.fixture(scope="module")
def gpt():
    return _module("gpt")


@pytest.fixture(scope="module")
def text():
    return _module("text")


@pytest.fixture(scope="module")
def cnn():
    return _module("cnn")


@pytest.fixture(scope="module")
def digits():
    pytest.importorskip("sklearn", reason="pip install 'pipectl[examples]'")
    return _module("digits")


def _losses(model: nn.Module, loss, data: Dataset, optimizer, batch_size: int) -> list[float]:
    losses = []
    for inputs, targets in DataLoader(data, batch_size, shuffle=True):
        optimizer.zero_grad()
        value = loss(model(inputs), targets)
        value.backward()
        optimizer.step()
        losses.append(value.item())
    return losses


def test_gpt_starts_near_even_odds_and_learns(gpt, text):
    torch.manual_seed(0)
    vocabulary = text["VOCABULARY"]
    model = gpt["build"](vocabulary=vocabulary, length=32, layers=2, width=64, heads=2)
    data = text["training"](length=32, megabytes=32 * 32 * 40 / 1e6)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = _losses(model, gpt["loss"], data, optimizer, batch_size=32)
    assert losses[0] == pytest.approx(math.log(vocabulary), abs=0.5)
    assert sum(losses[-5:]) / 5 < 3.3


def test_gpt_sees_no_later_character(gpt):
    model = gpt["build"](vocabulary=10, length=8, layers=2, width=16, heads=2, dropout=0.0)
    tokens = torch.randint(10, (1, 8))
    changed = tokens.clone()
    changed[0, 5] = (changed[0, 5] + 1) % 10
    before, after = model(tokens), model(changed)
    assert torch.equal(before[0, :5], after[0, :5])
    assert not torch.equal(before[0, 5:], after[0, 5:])


def test_perplexity_is_over_all_characters(gpt):
    outputs, targets = torch.randn(5, 4, 10), torch.randint(10, (5, 4))
    metric = gpt["Perplexity"]()
    metric.update(outputs[:3], targets[:3])
    metric.update(outputs[3:], targets[3:])
    expected = F.cross_entropy(outputs.reshape(20, 10), targets.reshape(20)).exp().item()
    assert metric.compute() == pytest.approx(expected, rel=1e-5)


def test_text_is_the_same_each_time_and_shifted_by_one(text):
    first, second = (text["training"](length=16, megabytes=0.01) for _ in range(2))
    assert len(first) == len(second) == (10_000 - 1) // 16
    for (inputs, targets), (again, _) in zip(list(first)[:20], list(second)[:20], strict=True):
        assert torch.equal(inputs, again)
        assert torch.equal(inputs[1:], targets[:-1])


def test_held_out_text_is_not_trained_on(text, monkeypatch):
    read: list[Path] = []

    def encode(files, _limit):
        read.extend(files)
        return torch.zeros(1000, dtype=torch.uint8)

    monkeypatch.setitem(text, "encode", encode)
    text["training"]()
    trained = set(read)
    read.clear()
    text["held_out"]()
    assert trained
    assert read
    assert not trained & set(read)


def test_text_knows_printable_characters_and_one_other(text, tmp_path):
    path = tmp_path / "sample.py"
    path.write_text("a b\té\n", encoding="utf-8")
    codes = _module("text")["encode"]([path], 100).tolist()
    alphabet = dict(enumerate(text["CHARACTERS"], start=1))
    assert [alphabet.get(code) for code in codes] == ["a", " ", "b", "\t", None, "\n"]


def test_cnn_learns_the_digits(cnn, digits):
    torch.manual_seed(0)
    model = cnn["build"](width=8, blocks=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = [
        loss
        for _ in range(2)
        for loss in _losses(model, F.cross_entropy, digits["training"](), optimizer, batch_size=64)
    ]
    assert losses[-1] < 0.3 * losses[0]
    model.eval()
    images, labels = digits["held_out"]().tensors
    assert cnn["accuracy"](model(images), labels) > 0.8


@pytest.mark.parametrize("scheduler", ["slurm", "pbs"])
def test_recipes_for_gpu_clusters_ask_for_a_rank_per_gpu(scheduler):
    spec = load(MODELS.parent / f"gpt-{scheduler}-gpus.yaml", ["site_defaults=false"])
    assert spec.launch.scheduler == scheduler
    assert spec.resources.gpus_per_node == spec.resources.tasks_per_node > 1
    assert spec.resources.nodes > 1
    assert (spec.slurm.partition, spec.pbs.queue)[scheduler == "pbs"] == "gpu"


@pytest.mark.parametrize("path", sorted(MODELS.parent.glob("*.yaml")), ids=lambda path: path.stem)
def test_schedules_of_the_learning_rate_end_with_the_run(path):
    spec = load(path, check_files=False)
    if spec.lr_scheduler is not None:
        kwargs = spec.lr_scheduler.kwargs
        assert kwargs.get("T_max", spec.training.steps) == spec.training.steps


@pytest.mark.parametrize("path", sorted(MODELS.glob("*.py")), ids=lambda path: path.name)
def test_models_know_nothing_of_pipectl(path):
    assert "pipectl" not in path.read_text(encoding="utf-8")


def test_lora_trains_on_tokens_and_on_bytes_only_without_a_tokenizer(
    tmp_path,
):
    pytest.importorskip("peft", reason="pip install 'pipectl[corpus]'")
    transformers = pytest.importorskip("transformers", reason="pip install 'pipectl[corpus]'")
    tokenizers = pytest.importorskip("tokenizers", reason="pip install 'pipectl[corpus]'")
    recipe, base, file = _module("causal_lm"), tmp_path / "base", tmp_path / "text"
    file.write_text("the loss of the sentence " * 4)
    with pytest.raises(FileNotFoundError, match=r"base is no directory with config\.json"):
        recipe["Text"](str(file), str(base))

    transformers.LlamaConfig(vocab_size=128).save_pretrained(base)
    of_bytes = recipe["Text"](str(file), str(base), length=4)
    assert bytes(of_bytes[0]["input_ids"].tolist()) == b"the "
    with pytest.raises(ValueError, match="100 tokens, fewer than a window of 128"):
        recipe["Text"](str(file), str(base))

    transformers.LlamaConfig(vocab_size=32000).save_pretrained(base)
    with pytest.raises(ValueError, match="no tokenizer for its vocabulary of 32000"):
        recipe["Text"](str(file), str(base), length=4)

    words = {"the": 300, "loss": 301, "of": 302, "sentence": 303}
    model = tokenizers.models.WordLevel(words, unk_token="the")
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(base)
    data = recipe["Text"](str(file), str(base), length=5)
    assert len(data) == 4
    assert data[1]["input_ids"].tolist() == data[1]["labels"].tolist() == [300, 301, 302, 300, 303]
