"""The recipes of configs/, which know nothing of pipectl, and models of the corpus, over ranks."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from pipectl.runs import RunDirectory, read_metrics
from pipectl.runtime import plain
from pipectl.runtime.checkpoint.export import export_file
from pipectl.spec import JobSpec, load
from tests.corpus import catalogue
from tests.equality.outcome import different, weights

CONFIGS = Path(__file__).parents[2] / "configs"
MODELS = CONFIGS / "models"


def module(name: str) -> dict[str, Any]:
    """The globals of a file of configs/models, which is no package."""
    path = MODELS / f"{name}.py"
    variables: dict[str, Any] = {"__name__": name}
    exec(compile(path.read_text(encoding="utf-8"), path, "exec"), variables)
    return variables


def test_gpt_sees_no_later_character():
    sizes = {"vocabulary": 10, "length": 8, "layers": 2, "width": 16, "heads": 2}
    model = module("gpt")["build"](**sizes, dropout=0.0)
    tokens = torch.randint(10, (1, 8))
    changed = tokens.clone()
    changed[0, 5] = (changed[0, 5] + 1) % 10
    before, after = model(tokens), model(changed)
    assert torch.equal(before[0, :5], after[0, :5])
    assert not torch.equal(before[0, 5:], after[0, 5:])


def test_text_is_the_same_each_time_shifted_by_one_and_of_known_characters(tmp_path):
    text = module("text")
    first, second = (text["training"](length=16, megabytes=0.01) for _ in range(2))
    assert len(first) == len(second) == (10_000 - 1) // 16
    for (inputs, targets), (again, _) in zip(list(first)[:20], list(second)[:20], strict=True):
        assert torch.equal(inputs, again)
        assert torch.equal(inputs[1:], targets[:-1])
    path = tmp_path / "sample.py"
    path.write_text("a b\té\n", encoding="utf-8")
    alphabet = dict(enumerate(text["CHARACTERS"], start=1))
    found = [alphabet.get(code) for code in text["encode"]([path], 100).tolist()]
    assert found == ["a", " ", "b", "\t", None, "\n"]


def test_held_out_text_is_not_trained_on(monkeypatch):
    text, read = module("text"), list[list[Path]]()

    def encode(files, _limit):
        read.append(list(files))
        return torch.zeros(1000, dtype=torch.uint8)

    monkeypatch.setitem(text, "encode", encode)
    text["training"]()
    text["held_out"]()
    trained, held_out = map(set, read)
    assert len(trained | held_out) == len(trained) + len(held_out) > len(trained) > 0


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.stem)
def test_rates_end_with_the_run_and_gpu_clusters_are_asked_for_a_rank_per_gpu(path):
    spec = load(path, ["site_defaults=false"], check_files=False)
    if spec.lr_scheduler is not None:
        kwargs = spec.lr_scheduler.kwargs
        assert kwargs.get("T_max", spec.training.steps) == spec.training.steps
    if path.stem.endswith("gpus"):
        assert spec.launch.scheduler == path.stem.split("-")[1]
        assert spec.resources.gpus_per_node == spec.resources.tasks_per_node > 1
        assert spec.resources.nodes > 1
        assert "gpu" in (spec.slurm.partition, spec.pbs.queue)


def test_models_know_nothing_of_pipectl():
    for path in MODELS.glob("*.py"):
        assert "pipectl" not in path.read_text(encoding="utf-8"), path


def test_lora_trains_on_tokens_and_on_bytes_only_without_a_tokenizer(tmp_path):
    pytest.importorskip("peft", reason="pip install '.[corpus]'")
    transformers = pytest.importorskip("transformers", reason="pip install '.[corpus]'")
    tokenizers = pytest.importorskip("tokenizers", reason="pip install '.[corpus]'")
    recipe, base, file = module("causal_lm"), tmp_path / "base", tmp_path / "text"
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


def read(name: str, *overrides: str) -> JobSpec:
    return load(CONFIGS / f"{name}.yaml", ["site_defaults=false", *overrides])


@pytest.fixture
def trained(tmp_path, run_in, train):
    """``trained(spec, 1, 2)``: the job over so many ranks, with a stage on each."""

    def start(spec, *counts):
        runs = []
        for ranks in counts:
            resources = spec.resources.model_copy(update={"tasks_per_node": ranks})
            pipeline = spec.pipeline.model_copy(update={"stages": ranks, "memory_limit": None})
            changes = {"resources": resources, "pipeline": pipeline}
            runs.append(run_in(tmp_path / "runs", spec.model_copy(update=changes)))
        train(*runs)
        return runs

    return start


def losses(run: RunDirectory) -> list[float]:
    return [line.loss for line in read_metrics(run) if line.is_step]


def evaluations(run: RunDirectory) -> list[Any]:
    return [line.evaluation for line in read_metrics(run) if line.evaluation is not None]


def assert_equal(one: RunDirectory, two: RunDirectory) -> None:
    assert losses(two) == losses(one)
    assert evaluations(two) == evaluations(one)
    assert different(weights(one.path), weights(two.path)) == []


DIGITS = ["pipeline.micro_batches=2", "model.kwargs={width: 8, blocks: 1}"]
NAMES = [
    *("training.batch_size=16", "pipeline.micro_batches=2"),
    "model.kwargs={length: 32, layers: 1, width: 32, heads: 2}",
    "data.kwargs={length: 32, limit: 200}",
    "data.buckets=[32]",
    "evaluation.data.kwargs={length: 32, limit: 50}",
]


def test_a_recipe_with_sequences_learns_in_one_process(tmp_path):
    spec = read("names-seq2seq", "training.steps=10", *NAMES)
    plain.train(spec, 8, tmp_path)
    found = json.loads((tmp_path / plain.LOSSES).read_text())["losses"]
    assert sum(found[-5:]) / 5 < 0.95 * found[0]


@pytest.mark.mpi
@pytest.mark.parametrize(
    ("name", "steps", "learns", "overrides"),
    [
        (
            "gpt-stdlib",
            20,
            0.75,
            [
                *("training.batch_size=16", "pipeline.micro_batches=2"),
                "model.kwargs={vocabulary: 98, length: 32, layers: 2, width: 64, heads: 2}",
                "data.kwargs={length: 32, megabytes: 0.05}",
                "evaluation.data.kwargs={length: 32, windows: 8}",
            ],
        ),
        pytest.param("digits-cnn", 20, 0.2, DIGITS, marks=pytest.mark.product),
        pytest.param("names-seq2seq", 10, 0.95, NAMES, marks=pytest.mark.product),
    ],
)
def test_recipes_learn_over_ranks(name, steps, learns, overrides, trained):
    """The first learns what it learns on one rank; models of the kinds of the others are compared
    with one rank below, and in tests/equality."""
    if name == "digits-cnn":
        pytest.importorskip("sklearn", reason="pip install '.[examples]'")
    halfway = f"evaluation.every={steps // 2}"
    counts = (1, 2) if name == "gpt-stdlib" else (2,)
    *alone, run = trained(read(name, f"training.steps={steps}", halfway, *overrides), *counts)
    for one in alone:
        assert_equal(one, run)
    found, (first, last) = losses(run), evaluations(run)
    assert sum(found[-5:]) / 5 < learns * found[0]
    assert last["loss"] < first["loss"]
    if name == "gpt-stdlib":
        assert found[0] == pytest.approx(math.log(98), abs=0.5)  # even odds
        assert last["perplexity"] == pytest.approx(math.exp(last["loss"]), rel=1e-5)
    if name == "digits-cnn":
        assert last["accuracy"] > 0.8


FURTHER = ("encoder-decoder", "autoencoder")


@pytest.mark.mpi
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "name",
    [
        "codebook",
        *(pytest.param(name, marks=pytest.mark.product) for name in FURTHER),
        *(pytest.param(name, marks=pytest.mark.corpus) for name in ("structured", "t5", "gpt2")),
        *(pytest.param(name, marks=pytest.mark.corpus) for name in ("resnet18", "swin-t")),
    ],
)
def test_models_of_the_corpus_train_over_ranks_as_on_one(name, tmp_path, trained):
    entry = next(entry for entry in catalogue.entries() if entry.name == name)
    if entry.missing:
        pytest.skip(f"{entry.package} is not installed")
    assert_equal(*trained(catalogue.spec_of(entry, tmp_path / "job.yaml"), 1, 2))


@pytest.mark.mpi
def test_vision_transformer_learns_from_a_folder_of_images(tmp_path, trained):
    pytest.importorskip("torchvision", reason="pip install '.[corpus]'")
    image = pytest.importorskip("PIL.Image", reason="pip install '.[corpus]'")
    for name, colour in [("blue", (0, 0, 255)), ("red", (255, 0, 0))]:
        (tmp_path / "images" / name).mkdir(parents=True)
        for number in range(16):
            path = tmp_path / "images" / name / f"{number}.png"
            image.new("RGB", (40 + number, 48), colour).save(path)
    data = f"{{root: {tmp_path / 'images'}, image_size: 32}}"
    spec = read(
        "vit-images",
        "training={steps: 12, batch_size: 8}",
        "pipeline.micro_batches=2",
        "model.kwargs={classes: 2, image_size: 32, patch_size: 8, layers: 2, width: 32, heads: 2}",
        f"data={{factory: ./models/vision.py:training, kwargs: {data}, workers: 1}}",
        f"evaluation.data.kwargs={data}",
        "evaluation.every=12",
    )
    (run,) = trained(spec, 2)
    assert losses(run)[-1] < 0.5 * losses(run)[0]
    assert evaluations(run)[-1]["accuracy"] == 1


@pytest.mark.mpi
def test_what_lora_learnt_loads_in_plain_transformers(tmp_path, trained):
    pytest.importorskip("peft", reason="pip install '.[corpus]'")
    transformers = pytest.importorskip("transformers", reason="pip install '.[corpus]'")
    base, text = tmp_path / "base", tmp_path / "text"
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=128, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=2,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(base)
    text.write_bytes(b"the loss of this sentence falls. " * 100)
    spec = read(
        "lora-llm",
        "training={steps: 20, batch_size: 8}",
        "optimizer.kwargs.lr=0.05",
        "pipeline.micro_batches=2",
        f"model.kwargs.base={base}",
        f"data.kwargs={{file: {text}, base: {base}, length: 16}}",
    )
    (run,) = trained(spec, 2)
    assert sum(losses(run)[-5:]) < 0.97 * sum(losses(run)[:5])

    exported = tmp_path / "lora.safetensors"
    export_file(weights(run.path), exported)
    merge = module("causal_lm")["merge"]
    merged = merge(str(base), str(exported), str(tmp_path / "merged"))
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    tokens = torch.randint(128, (2, 16))
    with torch.no_grad():
        before = transformers.AutoModelForCausalLM.from_pretrained(base)(tokens).logits
        assert torch.equal(loaded(tokens).logits, merged.eval()(tokens).logits)
        assert not torch.equal(loaded(tokens).logits, before)
