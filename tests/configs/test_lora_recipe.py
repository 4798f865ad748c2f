"""The recipe with LoRA: the loss falls, and plain transformers loads what was learnt."""

from __future__ import annotations

from importlib import util
from pathlib import Path
from typing import Any

import pytest
import torch

from pipectl.cluster import assumed_cluster
from pipectl.planner import PlanRequest, make_plan
from pipectl.profiler import profile_job
from pipectl.profiler.effort import Effort
from pipectl.runs import RunDirectory, read_metrics
from pipectl.runtime import checkpoint
from pipectl.runtime.checkpoint.export import export_file
from pipectl.spec import dump, load

CONFIGS = Path(__file__).parents[2] / "configs"


@pytest.mark.mpi
def test_what_was_learnt_loads_in_plain_transformers(tmp_path: Path, launch: Any) -> None:
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
    spec = load(
        CONFIGS / "lora-llm.yaml",
        [
            "site_defaults=false",
            "training={steps: 20, batch_size: 8}",
            "optimizer.kwargs.lr=0.05",
            "pipeline.micro_batches=2",
            f"model.kwargs.base={base}",
            f"data.kwargs={{file: {text}, length: 16}}",
        ],
    )
    threads = torch.get_num_threads()
    profile = profile_job(spec, effort=Effort.FAST)
    torch.set_num_threads(threads)
    run = RunDirectory.create(tmp_path / "runs", "lora", 0.0)
    run.job.write_text(dump(spec))
    profile.save(run.profile)
    request = PlanRequest(spec.name, 8, micro_batches=2, stages=2)
    make_plan(profile, assumed_cluster("here", [2], 2, None), request).save(run.plan)
    done = launch(2, "-m", "pipectl.runtime.worker", "--run", run.path)
    assert done.returncode == 0, done.stderr
    losses = [line["loss"] for line in read_metrics(run) if "loss" in line]
    assert sum(losses[-5:]) < 0.97 * sum(losses[:5])

    exported = tmp_path / "lora.safetensors"
    export_file(checkpoint.load(run.checkpoints / "step-000020", weights_only=True), exported)
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
