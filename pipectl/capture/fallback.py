"""Models that no export takes as they are: the submodules that break become single operators.

Which they are is found by trying: the innermost submodule in which an export fails is kept as it
is, and where that is not enough (its result's size depends on values, say) the one around it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any

from torch import Tensor, nn
from torch.utils import _pytree as pytree

from pipectl.capture.explain import AS_IT_IS, EagerError, RefusedError, culprit, explain
from pipectl.capture.factories import is_torch_code
from pipectl.capture.graph import CapturedGraph
from pipectl.capture.names import in_model, own_name
from pipectl.capture.observe import Make, UnsuitableError, outlines
from pipectl.capture.refusals import UnrolledError
from pipectl.capture.step import Step
from pipectl.capture.tracing import Kept
from pipectl.errors import CaptureError
from pipectl.faults import is_user_code
from pipectl.units import did_you_mean

_SAMPLES = ((0, 2), (2, 5), (5, 9), (0, 4))
"""Micro-batches from which the rule for the sizes of a result is found: first and last sample."""

_ROOT = "model"
"""The user's model. It is kept whole only if that is sure to be what it takes, or if it is a
library's, so that its user cannot put the line that breaks into a submodule."""

Capture = Callable[[Kept], CapturedGraph]
Example = Callable[[int], Any]
Tell = Callable[[str], None]


class Fallback:
    """The submodules of a step that are kept as operators.

    Args:
        patterns: shell patterns of paths in the user's model, as the user gave them.
        make: gives parameters and buffers their values, where they have none.
        tell: called with what a capture does that takes long.

    Raises:
        CaptureError: a pattern matches nothing.
    """

    def __init__(self, step: Step, patterns: tuple[str, ...], make: Make, tell: Tell) -> None:
        self._step = step
        self._make = make
        self._tell = tell
        self._modules = dict(step.named_modules())
        # By their dictionaries, which the proxies that an export puts around modules share.
        self._path_of = {id(vars(module)): path for path, module in self._modules.items()}
        self._named = frozenset(path for pattern in patterns for path in self._matching(pattern))
        self._reasons: dict[str, str] = {}
        self._unrolls = False

    @property
    def found(self) -> dict[str, str]:
        """Why each submodule that is not named is kept, by its path in the user's model."""
        return {own_name(p): self._reasons[p] for p in self._paths() if p in self._reasons}

    def capture(self, size: int, example: Example, capture: Capture) -> CapturedGraph:
        """What ``capture`` gives, with as few submodules kept as it takes.

        Args:
            size: samples of the micro-batch that is exported.
            example: gives a batch of so many samples.

        Raises:
            CaptureError: it fails however the model is cut; names the user's line.
        """
        while True:
            try:
                kept = replace(self._kept(size, example), unrolls=self._unrolls)
                try:
                    return capture(kept)
                except UnrolledError as error:
                    self._keep_loop(error)
                except CaptureError as error:
                    self._keep(error)
            except UnsuitableError as error:
                self._widen(error.path, str(error), error.cure)

    def _kept(self, size: int, example: Example) -> Kept:
        modules = {path: self._modules[path] for path in self._paths()}
        if not modules:
            return Kept()
        samples = example(_SAMPLES[-2][1])
        batches = [(end - start, _rows(samples, start, end)) for start, end in _SAMPLES]
        try:
            return Kept(modules, outlines(self._step, modules, batches, self._make))
        except (UnsuitableError, CaptureError):
            raise
        except Exception:  # perhaps a model for one batch size
            return self._kept_for(size, example, modules)

    def _kept_for(self, size: int, example: Example, modules: dict[str, nn.Module]) -> Kept:
        """The same for one batch size alone."""
        try:
            found = outlines(self._step, modules, [(size, example(size))], self._make)
        except (UnsuitableError, CaptureError):
            raise
        except Exception as error:
            explained = explain(error)
            explained.__cause__ = error
            if self._inside(self._path(culprit(error))):
                raise explained from error
            self._keep(explained)  # a model without memory shows its further faults only now
            return self._kept(size, example)
        return Kept(modules, found, fixed=True)

    def _keep(self, error: CaptureError) -> None:
        """Keep the submodule in which an export failed; raise if there is none to blame."""
        eager = isinstance(error, EagerError)
        path = getattr(error, "path", "") or self._path(culprit(error))
        if path not in self._modules and f"{_ROOT}.{path}" in self._modules:
            path = f"{_ROOT}.{path}"  # within a mask, torch tells paths from the model on
        whole = path == _ROOT and (eager or self._is_of_a_library())
        if isinstance(error, RefusedError) or not (whole or self._may_be_kept(path)):
            raise error
        if self._inside(path):
            return self._widen(path, error.message)
        kind = type(self._modules[path])
        alike = [p for p, module in self._modules.items() if type(module) is kind]
        # Submodules of one class break in the same way, mostly; the second one settles it.
        again = any(other in self._reasons for other in alike)
        why = error.message.removeprefix("model: ").removeprefix("cannot be captured ")
        for other in alike if again else [path]:
            if whole or self._may_be_kept(other):
                self._reasons.setdefault(other, why)
        return None

    def _keep_loop(self, error: UnrolledError) -> None:
        """Keep the submodule that runs a long loop; one of the model itself is unrolled."""
        path = self._path(error.module)
        if self._may_be_kept(path):
            self._reasons[path] = error.message.removeprefix("model: cannot be captured ")
            return
        self._unrolls = True
        self._tell(
            f"capturing a long loop{error.place}, which takes minutes; to shorten it, {AS_IT_IS}"
        )

    def _widen(self, path: str, why: str, cure: str | None = None) -> None:
        """Keep the submodule around one that cannot be an operator of its own."""
        around = path.rpartition(".")[0]
        while isinstance(self._modules.get(around), nn.ModuleList | nn.ModuleDict):
            around = around.rpartition(".")[0]
        whole = around == _ROOT and (cure or self._is_of_a_library())
        if not (whole or self._may_be_kept(around)):
            raise CaptureError(
                f"model: {own_name(path)} cannot be captured, not even as one operator: it {why}"
                + (f" {self._reasons[path]}" if path in self._reasons and not cure else ""),
                cure=cure
                or "let it return tensors whose sizes follow from the batch size; or put it and "
                "what reads its results into a submodule of its own, or name such a part of the "
                "model under model.opaque",
            )
        self._reasons[around] = f"{own_name(path)} {why}"

    def _paths(self) -> list[str]:
        """Submodules that are kept and lie in no other that is."""
        paths = {*self._named, *self._reasons}
        return sorted(p for p in paths if not any(p.startswith(f"{other}.") for other in paths))

    def _inside(self, path: str) -> bool:
        return any(f"{path}.".startswith(f"{other}.") for other in self._paths())

    def _may_be_kept(self, path: str) -> bool:
        return path == "loss" or (path in self._modules and in_model(path))

    def _is_of_a_library(self) -> bool:
        """Whether an installed package other than torch brings the class of the model."""
        code = sys.modules.get(type(self._step.model).__module__)
        name = getattr(code, "__file__", None) or "<"
        return not (name.startswith("<") or is_user_code(name) or is_torch_code(name))

    def _path(self, module: nn.Module | None) -> str:
        return "" if module is None else self._path_of.get(id(vars(module)), "")

    def _matching(self, pattern: str) -> list[str]:
        own = {own_name(path): path for path in self._modules if in_model(path)}
        found = [path for name, path in own.items() if fnmatchcase(name, pattern)]
        if not found:
            raise CaptureError(
                f"model.opaque: {pattern!r} matches no submodule{did_you_mean(pattern, own)}",
                cure="name submodules as in model.named_modules(), or patterns such as blocks.*",
            )
        return found


def _rows(samples: Any, start: int, end: int) -> Any:
    return pytree.tree_map_only(Tensor, lambda tensor: tensor[start:end].clone(), samples)
