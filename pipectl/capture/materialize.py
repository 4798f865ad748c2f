"""Where the values of a model's parameters and buffers come from, and when they come to be."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from pipectl.capture.deferred import Deferred, is_deferred, settle
from pipectl.capture.names import in_model, own_name
from pipectl.capture.weights import Weights
from pipectl.errors import CaptureError
from pipectl.spec import JobSpec


class Materializer:
    """Builds the model of a job as ``model.materialize`` says, and fills in its tensors.

    Args:
        spec: of the job.

    Raises:
        DataFileError: ``model.weights`` cannot be read.
    """

    def __init__(self, spec: JobSpec) -> None:
        per_rank = spec.model.materialize == "per_rank"
        self._deferred = Deferred(spec.training.seed) if per_rank else None
        self._weights = None if spec.weights_path is None else Weights(spec.weights_path)
        self._names: Mapping[str, list[str]] = {}

    def build(self, make: Callable[[], nn.Module]) -> nn.Module:
        """What ``make`` returns: the model, without memory if each rank makes its own part.

        Raises:
            CaptureError: ``make`` fails, perhaps because tensors have no values yet.
        """
        if self._deferred is None:
            return make()
        try:
            with self._deferred.recording():
                model = make()
        except CaptureError as error:
            raise CaptureError(
                f"{error.message}; with materialize: per_rank, tensors have no values until a "
                "rank needs them",
                cure="see whether it runs with materialize: eager (and a small model); if it does, "
                "let the factory use torch operators alone, and no .numpy() of a parameter",
            ) from error
        settle(self._deferred, model)
        return model

    def start(self, step: nn.Module, states: Mapping[str, Tensor], tied: Mapping[str, str]) -> None:
        """Check the weights to start from, and fill them into what has memory already.

        Args:
            step: the wrapper that holds the model.
            states: its parameters and buffers, tied ones once.
            tied: further names of tied ones, to their name in ``states``.

        Raises:
            DataFileError: the weights do not fit the model.
        """
        if self._weights is None:
            return
        several: dict[str, list[str]] = {name: [name] for name in states if in_model(name)}
        for further, name in tied.items():
            several.setdefault(name, [name]).append(further)
        self._names = {n: [own_name(s) for s in names] for n, names in several.items()}
        persistent = step.state_dict(keep_vars=True)
        optional = {own_name(name) for name in states if name not in persistent}
        wanted = {own_name(name): states[name] for name in self._names}
        self._weights.check(
            wanted, {own_name(n): names for n, names in self._names.items()}, optional
        )
        for name, tensor in states.items():
            if not is_deferred(tensor) and (stored := self._stored(name, tensor)) is not None:
                with torch.no_grad():
                    tensor.copy_(stored)

    def make(self, name: str, tensor: Tensor) -> Tensor:
        """The values of a tensor without memory; a parameter stays one.

        Raises:
            CaptureError: neither the checkpoint nor the factory gives it values.
        """
        stored = self._stored(name, tensor)
        if stored is None:
            assert self._deferred is not None
            return self._deferred.make(tensor, own_name(name))
        return nn.Parameter(stored, tensor.requires_grad) if _is_parameter(tensor) else stored

    def _stored(self, name: str, like: Tensor) -> Tensor | None:
        stored = self._weights.name_of(self._names.get(name, [])) if self._weights else None
        if stored is None:
            return None
        assert self._weights is not None
        return self._weights.load(stored, like)


def _is_parameter(tensor: Tensor) -> bool:
    return isinstance(tensor, nn.Parameter)
