"""Every kind of wrong spec, with the whole message; and files that are no spec at all."""

# ruff: noqa: E501 (a message is one line)

from __future__ import annotations

from pathlib import Path

import pytest

from pipectl.errors import SpecError
from pipectl.spec import load

TOP_LEVEL = (
    "version, name, model, loss, data, optimizer, lr_scheduler, evaluation, training, pipeline, "
    "resources, launch, environment, checkpoint, trace, callbacks, tracking, output, cluster, slurm, pbs, sweep, site_defaults"
)
BOMB = "\n".join(
    ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    + [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 12)]
)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        # unknown keys
        ("resources: {gpu_per_node: 1}", "7:13: resources.gpu_per_node: unknown key; did you mean 'gpus_per_node'?"),
        ("zzz:", f"7:1: zzz: unknown key; known are {TOP_LEVEL}"),
        ("nam: x", "7:1: nam: unknown key; did you mean 'name'?"),
        ("walltime: 3", "7:1: walltime: unknown key; did you mean 'resources.walltime'?"),
        ("checkpoint:\n  often: 3", "8:3: checkpoint.often: unknown key; known are every, keep, keep_every, lead_time, max_requeues"),
        ("evaluation: {data: a:b, metrics: {m: {factor: a:b, factory: c:d}}}", "7:39: evaluation.metrics.m.factor: unknown key; did you mean 'factory'?"),
        ("tracking: wand", "7:1: tracking.wand: unknown key; did you mean 'wandb'?"),
        ("evaluation: {data: a:b, early_stopping: {patience: 2}}", "7:41: evaluation.early_stopping: needs evaluation.every; without it there is only one evaluation, at the end"),
        ("evaluation: {data: a:b, every: 2, early_stopping: {metric: acc}}", "7:60: evaluation.early_stopping.metric: 'acc' is not one of loss"),
        ("evaluation: {data: a:b, every: 2, early_stopping: {min_delta: -1}}", "7:63: evaluation.early_stopping.min_delta: must be a number of at least 0, not -1"),
        # structure
        ("resources: 5", "7:12: resources: must be a mapping, not 5"),
        ("checkpoint: ''", "7:13: checkpoint: must be a mapping, not ''"),
        ("launch: {args: x}", "7:16: launch.args: must be a list, not 'x'"),
        ("optimizer: {factory: a:b, kwargs: [1]}", "7:35: optimizer.kwargs: must be a mapping, not a list"),
        ("optimizer: {groups: [x]}", "7:22: optimizer.groups[0]: must be a mapping, not 'x'"),
        ("optimizer: {groups: [{lr: 1}]}", "7:22: optimizer.groups[0].match: missing"),
        # whole numbers
        ("resources: {nodes: two}", "7:20: resources.nodes: must be a whole number of at least 1, not 'two'"),
        ("resources: {nodes: 0}", "7:20: resources.nodes: must be a whole number of at least 1, not 0"),
        ("resources: {nodes: 1.5}", "7:20: resources.nodes: must be a whole number of at least 1, not 1.5"),
        ("resources: {nodes: '2'}", "7:20: resources.nodes: must be a whole number of at least 1, not the text '2'; remove the quotes"),
        ("resources: {nodes: true}", "7:20: resources.nodes: must be a whole number of at least 1, not true"),
        ("resources: {nodes: 9223372036854775808}", "7:20: resources.nodes: must be at most 9223372036854775807, not 9223372036854775808"),
        ("pipeline: {warm_up: [2, 0, x]}", "7:25: pipeline.warm_up[1]: must be a whole number of at least 1, not 0\njob.yaml:7:28: pipeline.warm_up[2]: must be a whole number of at least 1, not 'x'"),
        ("pipeline: {warm_up: fast}", "7:21: pipeline.warm_up: must be auto or a list, not 'fast'"),
        ("launch: {progress: core}", "7:20: launch.progress: core leaves no core to compute with: resources.cpus_per_task is 1; set it to 2 or more"),
        ("pipeline: {offload: host}", "7:21: pipeline.offload: frees nothing on ranks that compute on the CPU; write disk"),
        ("pipeline: {backward: apart}", "7:22: pipeline.backward: apart takes 2 ranks per stage: 2; resources give 1"),
        ("resources: {nodes: 4}\npipeline: {backward: apart, schedule: zb-v}", "8:22: pipeline.backward: cannot be apart with schedule zb-v, but with one of gpipe, 1f1b, pipedream, pipedream-2bw"),
        ("resources: {nodes: 4}\npipeline: {backward: apart, replicas: 2}", "8:22: pipeline.backward: cannot be apart with 2 replicas per stage; leave these out"),
        ("resources: {nodes: 4}\npipeline: {backward: apart, recompute: blocks}", "8:22: pipeline.backward: cannot be apart with recompute: blocks; write all, which sends only inputs"),
        ("resources: {nodes: 4}\npipeline: {backward: apart, offload: disk}", "8:22: pipeline.backward: cannot be apart with offload: what is offloaded would leave the rank at once"),
        # sizes and durations
        ("resources: {memory_per_node: 4Gigs}", "7:30: resources.memory_per_node: must be a size such as 4GiB, not '4Gigs'"),
        ("resources: {memory_per_node: 0}", "7:30: resources.memory_per_node: must be a size such as 4GiB, not 0"),
        ("resources: {memory_per_node: 99999999TiB}", "7:30: resources.memory_per_node: must be at most 9223372036854775807, not '99999999TiB'"),
        ("resources: {walltime: 90 minutes}", "7:23: resources.walltime: must be a time such as 01:30:00, 90m or 90 (minutes), not '90 minutes'"),
        # choices and flags
        ("launch: {scheduler: lsf}", "7:21: launch.scheduler: must be auto, local, slurm or pbs, not 'lsf'"),
        ("pipeline: {schedule: gpip}", "7:22: pipeline.schedule: must be auto, gpipe, 1f1b, interleaved, looped-bfs, zb-h1, zb-v, dualpipev, v-half, v-min, pipedream, pipedream-2bw or the name of a .csv file or of a package's schedule, not 'gpip'; did you mean 'gpipe'?"),
        ("pipeline: {replicas: 0}", "7:22: pipeline.replicas: must be auto, any or a whole number of at least 1, not 0"),
        ("site_defaults: yes", "7:16: site_defaults: must be true or false, not 'yes'"),
        # text
        ("output: {directory: ''}", "7:21: output.directory: is empty"),
        ('slurm: {account: "a\\n#SBATCH --uid=0"}', "7:18: slurm.account: must be one line; it contains a line break"),
        ("environment: {modules: [null, {}]}", "7:25: environment.modules[0]: must be text, not null\njob.yaml:7:31: environment.modules[1]: must be text, not a mapping"),
        ("environment: {variables: {A-B: 1}}", "7:27: environment.variables.A-B: is not a variable name; use letters, digits and '_'"),
        ("environment: {variables: {PIPECTL_ATTEMPT: 9}}", "7:27: environment.variables.PIPECTL_ATTEMPT: is reserved: the job script sets the variables that begin with PIPECTL_"),
        ("environment: {variables: {UID: 0}}", "7:27: environment.variables.UID: cannot be set: bash forbids it"),
        # options of sbatch and qsub
        ("slurm: {options: {qos: {a: b}}}", "7:24: slurm.options.qos: must be text, true or a list of texts, not a mapping"),
        ("slurm: {options: {x: [a, true, [b]]}}", "7:22: slurm.options.x: must be text, true or a list of texts, not a list"),
        ('slurm: {options: {qos: "a\\n#SBATCH --uid=0"}}', "7:24: slurm.options.qos: must be one line; it contains a line break"),
        ("slurm: {options: {qos: []}}", "7:24: slurm.options.qos: is empty"),
        ("slurm: {options: {H: a1-3}}", "7:22: slurm.options.H: takes no value; write H: true"),
        ("slurm: {options: {mail_type: END}}", "7:30: slurm.options.mail_type: is no option of sbatch without its dashes; write mail-type"),
        ("pbs: {options: {l: a b}}", "7:20: pbs.options.l: 'a b' cannot stand in a resource list of PBS, such as place=scatter:excl"),
        ("pbs: {select: a b}", "7:15: pbs.select: must be resources such as model=icelake, not 'a b'"),
        # keys that there were once
        ("slurm: {mail_type: END}", "7:9: slurm.mail_type: is no longer a key; write slurm.options: {mail-type: ...}"),
        ("slurm: {directives: [--gres=gpu:1]}", "7:9: slurm.directives: is no longer a key; write slurm.options: {gres: gpu:1}, say, for --gres=gpu:1"),
        ("launch: {progress_core: true}", "7:10: launch.progress_core: is no longer a key; write launch.progress: core"),
        ("resources: {more: [{nodes: 1}]}", "7:13: resources.more: is no longer a key; a job has nodes of one kind; ask for what the largest stage needs"),
        # references to user code
        ("optimizer: AdamW", "7:12: optimizer.factory: 'AdamW' names no function or class; write ./file.py:name or package.module:name"),
        ("optimizer: {factory: 'a.b:2f'}", "7:22: optimizer.factory: 'a.b:2f': '2f' is no name of a function or class; write ./file.py:name or package.module:name"),
        # across fields
        ("pipeline: {stages: 2}", "7:20: pipeline.stages: 2 stages need as many ranks; resources give nodes x tasks_per_node = 1 x 1"),
        ("pipeline: {micro_batches: 9}", "7:27: pipeline.micro_batches: a batch of 8 cannot be divided into 9; lower it or raise training.batch_size"),
        ("pipeline: {warm_up: [2, 1]}", "7:21: pipeline.warm_up: needs pipeline.stages: 2 as well"),
        ("pipeline: {stages: 1, warm_up: [2, 1]}", "7:32: pipeline.warm_up: has length 2, but pipeline.stages is 1"),
        ("pipeline: {stages: 1, micro_batches: 2, warm_up: [3]}", "7:50: pipeline.warm_up: 3 forwards, but there are 2 micro-batches"),
        ("pipeline: {stages: 3, schedule: interleaved}\nresources: {tasks_per_node: 2}", "7:20: pipeline.stages: 3 stages cannot go round over 2 ranks; schedule interleaved takes a multiple of them"),
        ("pipeline: {stages: 3, schedule: zb-v}\nresources: {nodes: 4}", "7:20: pipeline.stages: 3 stages cannot lie in a V over 4 ranks; schedule zb-v takes two per rank"),
        ("pipeline: {stages: 3, warm_up: [2, 1, 2]}\nresources: {nodes: 3}", "7:32: pipeline.warm_up: [2, 1, 2] must not increase from one stage to the next"),
        ("pipeline: {stages: 1, schedule: gpipe, warm_up: [1]}", "7:49: pipeline.warm_up: has no meaning with schedule gpipe, which has one of its own"),
        ("pipeline: {schedule: pipedream, stages: 1, warm_up: [1]}", "7:53: pipeline.warm_up: has no meaning with schedule pipedream, which has one of its own"),
        ("pipeline: {schedule: pipedream, micro_batches: 4}", "7:48: pipeline.micro_batches: 4 have no meaning with schedule pipedream, which updates after each; leave it out, or use another schedule than pipedream"),
        # duplicate and dangerous
        ("name: other", "7:1: name: given twice; first on line 2"),
        ("<<: {name: x}", "7:1: merging with '<<' is not supported; write the keys out"),
        ("? [a]\n: 3", "7:3: a key must be text, not a list or mapping"),
        ("output: {directory: !!python/object:os.system x}", "7:21: output.directory: the YAML tag '!!python/object:os.system' is not supported; remove it"),
        ("launch: {args: !!set {a, b}}", "7:16: launch.args: must be a list, not a mapping\njob.yaml:7:16: launch.args: the YAML tag '!!set' is not supported; remove it"),
        ('output: {directory: "\\e[1m"}', "7:21: output.directory: contains the unprintable character U+001B; remove it"),
        ('output: {directory: "a\\u202eb"}', "7:21: output.directory: contains the unprintable character U+202E; remove it"),
        ('output: {directory: "\\ud800"}', "7:21: output.directory: contains the unprintable character U+D800; remove it"),
        ('"a\\x1bb": 1', "7:1: contains the unprintable character U+001B; remove it"),
    ],
)  # fmt: skip
def test_a_wrong_key_or_value(added, text: str, message: str) -> None:
    assert "\n".join(added(text)) == f"job.yaml:{message}"


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("version: 1", "version: 2", "1:10: version: is 2; this pipectl reads version 1"),
        ("name: demo", "name: my job", "2:7: name: must be letters, digits, '.', '_' or '-', at most 64, not 'my job'"),
        ("steps: 10, ", "", "6:1: training.steps: missing"),
        ("steps: 10", "steps: 10, check_replicas: 5", "6:23: training.check_replicas: is no longer a key; remove it: replicas are compared every 100 steps and before every checkpoint"),
        ("steps: 10", "steps: 10, precision: fp16", "6:34: training.precision: must be float32, bf16 or float16, not 'fp16'"),
        ("steps: 10", "steps: 10, clip_grad_norm: 0", "6:39: training.clip_grad_norm: must be a number above 0, not 0"),
        ("steps: 10", "steps: 10, clip_grad_norm: .nan", "6:39: training.clip_grad_norm: must be a number above 0, not .nan"),
        ("steps: 10", "steps: 10, clip_grad_norm: '1'", "6:39: training.clip_grad_norm: must be a number above 0, not the text '1'; remove the quotes"),
        ("loss: {factory: torch.nn:MSELoss}", "loss: {factory: model, kwargs: {a: 1}}", "4:32: loss.kwargs: has no meaning if the model returns its loss"),
        ("loss: {factory: torch.nn:MSELoss}", "loss: {factory: model, weight: tokens}", "4:32: loss.weight: 'tokens' names no function or class; write ./file.py:name or package.module:name"),
        ("loss: {factory: torch.nn:MSELoss}", "loss:", "4:1: loss: missing"),
        ("TensorDataset}", "TensorDataset, buckets: [8, 4], pad: {x: 0}}", "5:58: data.buckets: [8, 4] must rise from one length to the next"),
        ("TensorDataset}", "TensorDataset, buckets: [4, 8]}", "5:58: data.buckets: needs data.pad: the fields to pad, with their values, such as {input_ids: 0, labels: -100}"),
        ("TensorDataset}", "TensorDataset, pad: {x: 0}}", "5:54: data.pad: needs data.buckets: the lengths to pad to, such as [128, 512]"),
        ("TensorDataset}", "TensorDataset, buckets: [4], pad: {x: y}}", "5:72: data.pad.x: must be a number, not 'y'"),
    ],
)  # fmt: skip
def test_a_wrong_required_key(complaints, minimal, old: str, new: str, message: str) -> None:
    assert complaints(minimal.replace(old, new)) == [f"job.yaml:{message}"]


@pytest.mark.parametrize(
    ("key", "message"),
    [
        ("clip_grad_norm: 1", "needs the gradients of all stages, which update at different times; leave it out"),
        ("precision: float16", "float16 skips a step if any stage overflows, but stages update at different times; use bf16"),
        ("on_nonfinite: skip", "skip leaves a step out on all ranks, but stages update at different times, and later steps have begun by then; use stop"),
    ],
)  # fmt: skip
def test_what_needs_a_flush(complaints, minimal, key: str, message: str) -> None:
    text = minimal.replace("steps: 10", f"steps: 10, {key}") + "pipeline: {schedule: pipedream-2bw}"
    (problem,) = complaints(text)
    name = key.partition(":")[0]
    assert f"training.{name}: {message}, or use another schedule than pipedream-2bw" in problem


def test_every_problem_is_told_at_once_in_file_order(added) -> None:
    text = """\
resources: {nodes: 0, walltime: long}
nam: x
pipeline: {stages: 0}
slurm: {account: "\\x07", account: b}
training: {}
"""
    assert added(text) == [
        "job.yaml:7:20: resources.nodes: must be a whole number of at least 1, not 0",
        "job.yaml:7:33: resources.walltime: must be a time such as 01:30:00, 90m or 90 (minutes), not 'long'",
        "job.yaml:8:1: nam: unknown key; did you mean 'name'?",
        "job.yaml:9:20: pipeline.stages: must be auto or a whole number of at least 1, not 0",
        "job.yaml:10:18: slurm.account: contains the unprintable character U+0007; remove it",
        "job.yaml:10:26: slurm.account: given twice; first on line 10",
        "job.yaml:11:1: training: given twice; first on line 6",
    ]  # fmt: skip


def test_fields_that_do_not_fit_are_told_with_other_problems(added) -> None:
    """Cross-field checks do not wait until the rest of the file is right."""
    text = "pipeline: {stages: 3, micro_batches: 9}\nname: a\nsite_defaults: 3\n"
    assert added(text) == [
        "job.yaml:7:20: pipeline.stages: 3 stages need as many ranks; resources give nodes x tasks_per_node = 1 x 1",
        "job.yaml:7:38: pipeline.micro_batches: a batch of 8 cannot be divided into 9; lower it or raise training.batch_size",
        "job.yaml:8:1: name: given twice; first on line 2",
        "job.yaml:9:16: site_defaults: must be true or false, not 3",
    ]  # fmt: skip


def test_missing_files_are_named_with_their_place(complaints, minimal, tmp_path) -> None:
    text = minimal.replace("torch.nn:Linear", "./gone.py:build") + (
        "cluster: gone.json\n"
        "evaluation: {data: ./gone.py:held_out, metrics: {m: ./gone.py:f}}\n"
        "optimizer: ../none/gone.py:f\n"
    )
    gone = tmp_path / "gone.py"
    assert complaints(text) == [
        f"job.yaml:3:18: model.factory: no such file: {gone}",
        f"job.yaml:7:10: cluster: no such file: {tmp_path / 'gone.json'}",
        f"job.yaml:8:20: evaluation.data.factory: no such file: {gone}",
        f"job.yaml:8:53: evaluation.metrics.m.factory: no such file: {gone}",
        f"job.yaml:9:12: optimizer.factory: no such file: {tmp_path.parent / 'none' / 'gone.py'}",
    ]


def test_all_required_keys_are_named(complaints) -> None:
    required = ("data", "loss", "model", "training")
    assert complaints("{}") == [f"job.yaml:1:1: {key}: missing" for key in required]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("pipeline:\n\tstages: 2", "8:1: not valid YAML: a tab cannot indent or start a value; use spaces"),
        ("pipeline:\n  stages: 2\n   schedule: gpipe", "9:12: not valid YAML: a ':' is out of place; check the indentation, or put the text in quotes"),
        ("a: b: c", "7:5: not valid YAML: a ':' is out of place; check the indentation, or put the text in quotes"),
        ("pipeline: {stages: 2", "7:21: not valid YAML: a bracket is not closed, or a comma is missing"),
        ("pipeline: {stages: 2\nslurm: {}", "8:6: not valid YAML: a bracket is not closed, or a comma is missing (opened on line 7)"),
        ("pipeline: {stages: [}", "7:21: not valid YAML: a value is missing, or has to be in quotes"),
        ("output: {directory: 'abc}\nslurm: {}\n", "9:1: not valid YAML: a quote is not closed (opened on line 7)"),
        ("pipeline\nresources: {}", "8:1: not valid YAML: a key without ':'; check this line and the one above"),
        ("- a", "7:1: not valid YAML: does not fit the lines above; check the indentation, quotes and brackets"),
        ("---\nname: x", "7:1: not valid YAML: a second document ('---'); only one is allowed"),
        ("output: {directory: *x}", "7:21: not valid YAML: an alias (*) without an anchor (&); put the text in quotes"),
        ("output: {directory: @x}", "7:21: not valid YAML: a character that cannot start a value; put the text in quotes"),
        ("output: {directory: * x}", "7:22: not valid YAML: text that starts with * or & must be in quotes"),
        ('output: {directory: "\\q"}', "7:23: not valid YAML: found unknown escape character 'q'"),
        ('output: {directory: "\\UFFFFFFFF"}', "7:24: not valid YAML: number out of range"),
        ("output: {directory: a\x01}", "7:22: contains the unprintable character U+0001; remove it"),
        ("x: &x [*x]", "7:4: nested more than 40 levels deep"),
    ],
)  # fmt: skip
def test_what_is_no_yaml(added, text: str, message: str) -> None:
    assert added(text) == [f"job.yaml:{message}"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", ": the file is empty"),
        (b"# nothing but a comment\n", ": the file is empty"),
        (b"[a]", ": must be a mapping of keys to values"),
        (b"name: \xe4", ":1:7: not UTF-8 text (byte 0xe4)"),
        (b"\x7fELF\x00\x01", ": a binary file; a job spec is YAML text"),
        (b"a: " + b"x" * 2**20, ": larger than 1 MiB, too large for a job spec"),
        (b"[" * 1000, ":1:41: nested more than 40 levels deep"),
        (b"? " * 1000, ":1:81: nested more than 40 levels deep"),
        (BOMB.encode(), ":1:34: more than 20000 values, counting aliases where they are used"),
    ],
)  # fmt: skip
def test_what_is_no_spec(complaints, content: bytes, message: str) -> None:
    assert complaints(content) == [f"job.yaml{message}"]


@pytest.mark.parametrize(
    ("name", "message", "cure"),
    [
        ("gone.yaml", "no such file", "write a starter spec with: pipectl init"),
        (".", "a directory, not a file", None),
        ("x" * 300, "cannot be read: File name too long", None),
    ],
)
def test_files_that_cannot_be_read(tmp_path, monkeypatch, name, message, cure) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SpecError) as caught:
        load(Path(name), sites=())
    assert caught.value.message == f"{name}: {message}"
    assert caught.value.cure == cure


def test_an_endless_file_is_not_read_to_its_end() -> None:
    with pytest.raises(SpecError, match="larger than 1 MiB"):
        load(Path("/dev/zero"), sites=())


def test_large_mappings_of_unknown_keys_are_told_quickly(complaints) -> None:
    assert len(complaints("\n".join(f"key{n}: {n}" for n in range(300)))) == 304
