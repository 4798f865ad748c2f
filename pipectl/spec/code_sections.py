"""Sections of the job spec that name user code: the model, the data, the loss, the optimizer, and
the script that makes them.

Field docstrings are the text of ``docs/spec-reference.md``; see :mod:`pipectl.spec.models`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationInfo,
    field_validator,
    model_validator,
)

from pipectl.files import escape_words
from pipectl.spec import argument_paths, types


class Factory(types.Section):
    """User code to call: a class, constructed with `kwargs`, or a function.

    A string is short for `{factory: string}`.
    """

    factory: types.Reference
    """`./file.py:name`, relative to the spec file, or `package.module:name`, which may also be next
    to the spec file."""
    kwargs: types.Keywords = Field(default_factory=dict)
    """Keyword arguments; the values keep their YAML types. A text that begins with `./` or `../` is
    a path relative to the spec file, and your code gets it as an absolute path. Other relative
    paths mean another file in a job than in `pipectl profile`: ranks run in the run directory. In
    texts that begin with these, `/`, `~/` or `$NAME/`, and in `$NAME` alone, variables are
    replaced as in other paths."""

    @model_validator(mode="before")
    @classmethod
    def _expand(cls, value: Any) -> Any:
        return {"factory": value} if isinstance(value, str) else value

    @field_validator("kwargs")
    @classmethod
    def _make_paths_absolute(cls, kwargs: Any, info: ValidationInfo) -> Any:
        base = types.base_of(info)
        return kwargs if base is None else argument_paths.make_absolute(kwargs, base)

    @classmethod
    def __get_pydantic_json_schema__(cls, core: Any, handler: Any) -> dict[str, Any]:
        return {"anyOf": [handler.resolve_ref_schema(handler(core)), _SHORT]}


_SHORT = {"title": "./file.py:name or package.module:name", "type": "string", "pattern": ":"}
Factories = Annotated[dict[types.Text, Factory], BeforeValidator(types.drop_nulls)]
"""User code by name."""


class Group(types.Section):
    """Parameters with options of their own.

    Every other key is an option of the optimizer, such as `lr` or `weight_decay`, and overrides
    `optimizer.kwargs`.
    """

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: types.Keywords = Field(init=False)

    match: types.Text
    """A pattern of full names as in `model.named_parameters()`, such as `*.bias`; `*` also matches
    dots. A parameter belongs to the first group that matches it."""

    @property
    def options(self) -> dict[str, Any]:
        """The optimizer's options for these parameters."""
        return dict(self.model_extra or {})


class Part(Factory):
    """User code to call, or `script` for what the script of the job makes; `script` is the default
    if there is one."""

    factory: types.PartReference
    """A reference as in [factories](#factories), or `script`."""

    @property
    def is_of_script(self) -> bool:
        """Whether the script of the job makes it."""
        return self.factory == types.SCRIPT


class Script(types.Section):
    """A training script that makes the model, the data, the loss and the optimizer of the job.

    Every process runs the file up to its first optimizer step, and takes what it has made. Each of
    these sections can be given instead. See [your training script](training-script.md).
    """

    file: types.File
    """The Python file, relative to the spec file."""
    arguments: tuple[types.Value, ...] = ()
    """Its arguments on the command line. Variables in them, and a `~` at the begin, are replaced as
    in paths."""
    directory: types.File | None = None
    """Its working directory, relative to the spec file; by default that of `file`."""
    drawn_between_epochs: types.Natural = 0
    """Random numbers of 32 bits that the script draws between two epochs, by reading other data for
    example: after as many, the order of the samples in a later epoch is the script's, too. `init`
    counts them."""

    @field_validator("file")
    @classmethod
    def _without_dots(cls, value: str) -> str:
        """Without ``..``: the files that the script imports must have one name, however found."""
        path = Path(value)
        return str(path.parent.resolve() / path.name) if path.is_absolute() else value

    @field_validator("arguments")
    @classmethod
    def _make_texts(cls, values: tuple[Any, ...]) -> tuple[str, ...]:
        return tuple(map(str, values))


def setting_of(arguments: Sequence[str]) -> str:
    """The value of ``--set`` for arguments of a script that a shell has expanded."""
    texts = [escape_words(text) for text in arguments]
    return f"script.arguments={json.dumps(texts, ensure_ascii=False)}"


class Model(Part):
    """The model: a function that returns it, or its class."""

    materialize: Literal["eager", "per_rank"] = "eager"
    """When parameters are created: `eager` builds the whole model in every process; `per_rank`
    builds it without memory, and each rank creates only the parameters of its own stages. Their
    random values follow from `training.seed`: the same for every plan, but not those of `eager`."""
    opaque: tuple[types.Text, ...] = ()
    """Submodules to keep whole, as one operator each that runs their own code: patterns of names as
    in `model.named_modules()`, such as `blocks.*.router`. Submodules that cannot be captured are
    kept whole without being named."""
    weights: types.File | None = None
    """Weights to start from, relative to the spec file: a safetensors file, its `.index.json`, or a
    directory of them; by default those that the factory creates."""


class Optimizer(Part):
    """The optimizer, called with the parameters."""

    factory: types.PartReference = "torch.optim:AdamW"
    """The optimizer class, a function that returns an optimizer, or `script`. Each rank calls it
    with the parameters of its own stages (with `shard_optimizer`, its part of them), in the order
    of `model.named_parameters()`, or with a list of parameter groups if there are `groups`."""
    groups: tuple[Group, ...] = ()
    """Parameters with options of their own. For learning-rate schedules with one value per group,
    the group of all other parameters is the first."""


class Data(Part):
    """The training data: a function that returns the dataset, or the class of one.

    A sample is `(inputs, targets)` or a mapping; inputs go to the model (a mapping as keywords).
    Python's, numpy's and torch's shared generators are seeded by `training.seed` before each data
    factory, also that of `evaluation.data`: the same random split has the same parts in both, and
    data that are only drawn are the same, too, unless they have a generator of their own.
    """

    workers: types.Natural = 0
    """Processes that load samples, per rank. They change no sample: iterable data are read by one
    of them, since each of several would read all of it, or a part in another order. Those of a
    script are read by as many as its `DataLoader` has, which decide which samples come."""
    drop_last: types.Flag = False
    """Leave out the last batch of an epoch if it is not full. Batches of iterable data are always
    full: they continue into the next epoch."""
    read: Literal["auto", "once", "everywhere"] = "auto"
    """Which ranks read samples, held-out ones too: each rank those that it needs (`everywhere`; a
    sample that differs between ranks ends the run), or one rank for all (`once`). `auto` chooses
    `once` for iterable data, and if the profile found samples that differ between processes."""
    shuffle: types.Flag | None = None
    """Draw a new order of samples every epoch, from `training.seed`. Iterable data keep their own
    order. By default true, except for the data of a script, which keep the order of its
    `DataLoader`."""
    buckets: tuple[types.Count, ...] = ()
    """Lengths that sequences are padded to, rising: each step takes samples of one bucket, the
    shortest that holds them. By default all samples have one shape. Held-out data are padded
    likewise."""
    pad: types.Padding = Field(default_factory=dict)
    """Fields that are padded to the length of a bucket, with the value for each, such as
    `{input_ids: 0, labels: -100}`. The fields of a mapping have the names of its keys, the two of a
    pair `inputs` and `targets`; the first dimension of each is the sequence."""


class HeldOut(Part):
    """The held-out dataset: a function that returns it, the class of one, or `script`."""


class Loss(Part):
    """The loss, called with `(outputs, targets)`."""

    factory: types.LossReference
    """The loss function or class; `model`: the model returns its loss; or `script`."""
    weight: types.WeightReference = "samples"
    """Weight of a micro-batch in the loss of a step or evaluation: its number of `samples`; or a
    function of its `targets`, such as the number of valid tokens, if the loss is a mean
    [over these](reading-a-plan.md#how-the-loss-is-weighted); or `sum`, if the loss is a sum over
    samples: then the losses of micro-batches are added up."""

    @property
    def adds_up(self) -> bool:
        """Whether the losses of micro-batches are added up."""
        return self.weight == types.SUM

    @property
    def weigher(self) -> str | None:
        """What names the function that weighs micro-batches; None if there is none."""
        return None if self.weight in (types.SAMPLES, types.SUM) else self.weight
