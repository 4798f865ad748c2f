"""Stages through ``torch.compile``, for jobs with ``training.compile: true``.

What draws random numbers, and what seeds it, runs as it is between compiled pieces: a compiler's
own dropout draws other masks than the operator. All else may be fused, so sums are rounded in
another order than without, and results agree within a tolerance only.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx

from pipectl.capture.randomness import SEEDERS
from pipectl.capture.stage import StageCode
from pipectl.errors import CaptureError

Backend = str | Callable[..., Any]


def compile_stage(code: StageCode, backend: Backend = "inductor") -> StageCode:
    """The same stage, compiled when it is first called, for the sizes it is called with.

    Args:
        backend: of ``torch.compile``, or a name of one.

    The stage's first call raises CaptureError where nothing can be compiled.
    """
    return replace(code, module=_Compiled(code, backend))


class _Compiled:
    """A stage's function. The seed goes past the compiler, which would compile anew for each."""

    def __init__(self, code: StageCode, backend: Backend) -> None:
        assert isinstance(code.module, fx.GraphModule)
        self._seed = 0
        graph = fx.Graph()
        graph.output(graph.graph_copy(code.module.graph, {}))
        self._keep_random_operators(graph)
        graph.erase_node(next(iter(graph.nodes)))
        module = fx.GraphModule(code.module, graph)
        self._run = torch.compile(module, backend=backend, dynamic=False)

    def __call__(self, seed: int, *arguments: Any) -> tuple[Tensor, ...]:
        self._seed = seed
        try:
            return self._run(*arguments)  # type: ignore[no-any-return]
        except Exception as error:
            if not type(error).__module__.startswith(("torch._inductor", "torch._dynamo")):
                raise
            raise CaptureError(
                f"training.compile: torch.compile fails: {str(error).splitlines()[0]}",
                cure="see to a C++ compiler on the nodes (the variable CXX names it), "
                "or set training.compile: false",
            ) from error

    def _keep_random_operators(self, graph: fx.Graph) -> None:
        """Put each operator that is seeded, and its seeder, where the compiler looks not."""
        drawing = False
        for node in graph.nodes:
            seeds = node.op == "call_function" and node.target in SEEDERS
            if seeds:
                node.target = self._seeding(node.target, node.args[1])
                node.args = ()
            elif drawing:
                node.target = _apart(node.target)
            drawing = seeds

    def _seeding(self, seeder: Callable[[int, int], None], key: int) -> Callable[[], None]:
        return _apart(lambda: seeder(self._seed, key))


def _apart(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that the compiler calls without compiling it."""

    def call(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return torch.compiler.disable(call)  # type: ignore[no-any-return, no-untyped-call]
