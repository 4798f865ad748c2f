"""Builds what a spec names: the model, and the loaders of its data.

A part that the job takes from its script is what the script has made.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from pipectl.capture import factories
from pipectl.capture.data import Loader, check_dataset
from pipectl.capture.deferred import Deferred
from pipectl.capture.model_with_loss import as_module
from pipectl.capture.randomness import seed_of
from pipectl.errors import CaptureError
from pipectl.objects import seed_everything
from pipectl.script import Command, Parts
from pipectl.spec import JobSpec
from pipectl.spec.code_sections import Factory


def build_model(spec: JobSpec, deferred: Deferred | None = None) -> nn.Module:
    """Return the model of a job, with the initial values that its seed gives it.

    Raises:
        CaptureError: see :class:`~pipectl.capture.CapturedJob`.
    """
    if spec.model.is_of_script and (parts := parts_of_script(spec)) is not None:
        return parts.model
    seed_everything(spec.training.seed)
    factory, name = factories.find(spec.model.factory), spec.model.factory

    if isinstance(factory, nn.Module):
        raise CaptureError(
            f"model.factory: {name}: is a model that the module has made, not what makes one",
            hint=f"name the class {type(factory).__name__}, or a function that returns a new model",
        )

    def build() -> nn.Module:
        return as_module(
            factories.call(factory, f"model.factory: {name}", **spec.model.kwargs), name
        )

    return build() if deferred is None else deferred.build(build)


def parts_of_script(spec: JobSpec) -> Parts | None:
    """Run the script of a job and return what it has made; None if the job takes nothing of it.

    Raises:
        CaptureError: see :class:`~pipectl.capture.CapturedJob`.
    """
    parts = spec.model, spec.loss, spec.data, spec.optimizer
    if spec.script is None or not any(part.is_of_script for part in parts):
        return None
    return Parts.of(Command.of(spec))


def training_loader(spec: JobSpec, script: Parts | None) -> Loader:
    """Return the training data.

    Args:
        script: what the job's script has made; see :func:`parts_of_script`.

    Raises:
        CaptureError: see :class:`~pipectl.capture.CapturedJob`.
    """
    if spec.data.is_of_script:
        assert script is not None, "checked with the spec"
        return _loader_of(spec, spec.data, "data", script.dataset())
    return _loader(spec, spec.data, "data")


def evaluation_loader(spec: JobSpec, script: Parts | None) -> Loader | None:
    """Return the held-out data, or None.

    Args:
        script: see :func:`parts_of_script`.

    Raises:
        CaptureError: see :class:`~pipectl.capture.CapturedJob`.
    """
    if spec.evaluation is None:
        return None
    item, section = spec.evaluation.data, "evaluation.data"
    if not item.is_of_script:
        return _loader(spec, item, section)
    assert script is not None, "checked with the spec"
    return _loader_of(spec, item, section, script.held_out(item.kwargs["loader"]))


def _loader(spec: JobSpec, item: Factory, section: str) -> Loader:
    seed = spec.training.seed
    factory = factories.find(item.factory)  # first: a module may draw when it is imported
    # One seed for training and held-out data, so that both factories split rows alike.
    seed_everything(seed_of(seed, "data") >> 32)
    dataset = factories.call(factory, f"{section}.factory: {item.factory}", **item.kwargs)
    check_dataset(dataset, section, item.factory)
    return _loader_of(spec, item, section, dataset)


def _loader_of(spec: JobSpec, item: Factory, section: str, dataset: Any) -> Loader:
    data, seed = spec.data, spec.training.seed
    training = item is data
    ordered = training and data.is_of_script and data.shuffle is None
    return Loader(
        dataset,
        seed=seed,
        batch_size=spec.training.batch_size if training else None,
        drop_last=training and data.drop_last,
        workers=data.workers if training else 0,
        shuffle=training and data.shuffle is not False,
        order=getattr(dataset, "order", None) if ordered else None,
        buckets=data.buckets,
        pad=data.pad,
        section=section,
        in_turn=getattr(dataset, "in_turn", None) if training else None,
    )
