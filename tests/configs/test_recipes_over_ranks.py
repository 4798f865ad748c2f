"""The recipes in small sizes, trained over real MPI ranks with a stage each."""

from importlib import util
from pathlib import Path
from typing import Any

import pytest
import torch

from pipectl.runs import RunDirectory, read_metrics
from pipectl.runtime import checkpoint
from pipectl.runtime.checkpoint.export import export_file
from pipectl.spec import JobSpec, load

CONFIGS = Path(__file__).parents[2] / "configs"
pytestmark = pytest.mark.mpi


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


def weights_of(run: RunDirectory, step: int) -> dict[str, torch.Tensor]:
    return checkpoint.load(run.checkpoints / f"step-{step:06}", weights_only=True)


@pytest.mark.parametrize(
    ("name", "needs", "overrides"),
    [
        ("digits-cnn", "sklearn", ["model.kwargs={width: 8, blocks: 1}"]),
        (
            "names-seq2seq",
            "torch",
            [
                "model.kwargs={length: 32, layers: 1, width: 32, heads: 2}",
                "data.kwargs={length: 32, limit: 200}",
                "data.buckets=[32]",
                "evaluation.data.kwargs={length: 32, limit: 200}",
            ],
        ),
    ],
)
def test_weights_and_evaluations_do_not_depend_on_the_ranks(name, needs, overrides, trained):
    pytest.importorskip(needs, reason="pip install 'pipectl[examples]'")
    spec = read(name, "training.steps=4", "evaluation.every=2", *overrides)
    one, two = trained(spec, 1, 2)
    first, last = evaluations(one)
    assert first != last
    assert evaluations(two) == [first, last]
    expected, weights = weights_of(one, 4), weights_of(two, 4)
    assert weights.keys() == expected.keys()
    assert [key for key in expected if not torch.equal(expected[key], weights[key])] == []


def test_vision_transformer_learns_from_a_folder_of_images(tmp_path, trained):
    pytest.importorskip("torchvision", reason="pip install 'pipectl[corpus]'")
    image = pytest.importorskip("PIL.Image", reason="pip install 'pipectl[corpus]'")
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


def test_what_lora_learnt_loads_in_plain_transformers(tmp_path, trained):
    pytest.importorskip("peft", reason="pip install 'pipectl[corpus]'")
    transformers = pytest.importorskip("transformers", reason="pip install 'pipectl[corpus]'")
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
    export_file(weights_of(run, 20), exported)
    recipe = util.spec_from_file_location("causal_lm", CONFIGS / "models" / "causal_lm.py")
    assert recipe is not None
    assert recipe.loader is not None
    module = util.module_from_spec(recipe)
    recipe.loader.exec_module(module)
    merged = module.merge(str(base), str(exported), str(tmp_path / "merged"))
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    tokens = torch.randint(128, (2, 16))
    with torch.no_grad():
        before = transformers.AutoModelForCausalLM.from_pretrained(base)(tokens).logits
        assert torch.equal(loaded(tokens).logits, merged.eval()(tokens).logits)
        assert not torch.equal(loaded(tokens).logits, before)
