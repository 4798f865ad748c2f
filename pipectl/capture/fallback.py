"""Submodules that cannot be exported: each becomes a single operator.

They are found by trial: the innermost submodule in which an export fails is kept as it is; if that
is not enough (because the size of its result depends on values, for example), the submodule around
it is kept. The model first runs on a few small batches, which shows the result of each call of such
a submodule. During the export, each call is recorded as one operator.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import partial
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor, nn

from pipectl.capture.draws import watched_entropy, watched_seeds
from pipectl.capture.factories import is_torch_code
from pipectl.capture.graph import CapturedGraph
from pipectl.capture.model_with_loss import (
    ModelWithLoss,
    States,
    in_model,
    own_name,
    register_dataclasses,
    tie_error,
)
from pipectl.capture.opaque import (
    Arguments,
    Opaque,
    Outline,
    UnsuitableError,
    anchored,
    one_or_tuple,
    write_buffers_once,
)
from pipectl.capture.patches import Mask, Recorder
from pipectl.capture.python_state import (
    Entry,
    extra_states,
    own_generators,
    preserve_state,
    put,
    refuse_extra_states,
)
from pipectl.capture.randomness import (
    SHARED_GENERATORS,
    states_of,
)
from pipectl.capture.refusals import (
    AS_IT_IS,
    Keep,
    Refusal,
    RefusedError,
    culprit,
    explain,
    place_of,
)
from pipectl.capture.side_effects import Call, SideEffects, refused_changes
from pipectl.capture.tensors import fill_sample, is_deferred, is_same, storage_of, tensors_in
from pipectl.errors import CaptureError
from pipectl.faults import is_user_code
from pipectl.objects import generator_state, seed_everything, set_state
from pipectl.torch_api import (
    buffers_of,
    count_nodes,
    detect_fake_mode,
    functions_since,
    pytree,
    uncompiled,
    untouched_by_modes,
    version_of,
)
from pipectl.units import did_you_mean

_SAMPLES = ((0, 2), (2, 5), (5, 9), (0, 4))
"""Micro-batches from which the rule for the sizes of a result is found: first and last sample."""
_MAX_SAMPLES = 9
_ROOT = "model"
"""The user's model. It is kept whole only if that is sure to be what it takes, or if it is a
library's, so that its user cannot put the line that breaks into a submodule."""

Make = Callable[[Tensor], Tensor]
"""The values of a parameter or buffer, which may have none yet."""
Notify = Callable[[str], None]


@dataclass(frozen=True)
class KeptModules:
    """Submodules that become operators.

    Args:
        modules: with the outlines of their results.
        fixed: whether the outlines are known for one batch size only.
        unrolls: whether loops in the rest of the model may be of any length.
        read: buffers that they read but do not get, by full name, each with the refusal for it if
            a forward changes it.
    """

    modules: Sequence[KeptModule] = ()
    fixed: bool = False
    unrolls: bool = False
    read: Mapping[str, RefusedError] = field(default_factory=dict)


class Fallback:
    """The submodules of model and loss that are kept as operators.

    Args:
        patterns: the user's shell patterns of paths in the model.
        make: gives parameters and buffers their values, if they have none.
        notify: called with a message if a capture takes long.

    Raises:
        CaptureError: a pattern matches nothing.
    """

    def __init__(
        self, wrapper: ModelWithLoss, patterns: tuple[str, ...], make: Make, notify: Notify
    ) -> None:
        self._wrapper, self._make, self._notify = wrapper, make, notify
        self._modules = dict(wrapper.named_modules())
        # By their dictionaries, which the proxies that an export puts around modules share.
        self._path_of = {id(vars(module)): path for path, module in self._modules.items()}
        self._reasons: dict[str, str] = {}
        self._unrolls = False
        self._named: set[str] = set()
        own = {own_name(path): path for path in self._modules if in_model(path)}
        for pattern in patterns:
            paths = {path for name, path in own.items() if fnmatchcase(name, pattern)}
            if not paths:
                raise CaptureError(
                    f"model.opaque: {pattern!r} matches no submodule{did_you_mean(pattern, own)}",
                    hint="name submodules as in model.named_modules(), or patterns such as "
                    "blocks.*",
                )
            self._named |= paths
        code = sys.modules.get(type(wrapper.model).__module__)
        name = getattr(code, "__file__", None) or "<"
        self._is_of_a_library = not (
            name.startswith("<") or is_user_code(name) or is_torch_code(name)
        )

    @property
    def reasons(self) -> dict[str, str]:
        """Why each submodule that the user did not name is kept, by its path in the model."""
        return {own_name(p): self._reasons[p] for p in self._paths() if p in self._reasons}

    def capture(
        self,
        size: int,
        example: Callable[[int], Any],
        capture: Callable[[KeptModules], CapturedGraph],
    ) -> CapturedGraph:
        """Return the result of ``capture``, with as few submodules kept as possible.

        Args:
            size: samples of the micro-batch that is exported.
            example: returns a batch of a given size.

        Raises:
            CaptureError: it fails whatever is kept; names the user's line.
        """
        while True:
            try:
                return capture(self._observe(size, example))
            except RefusedError as error:
                self._keep(error)

    def _observe(self, size: int, example: Callable[[int], Any]) -> KeptModules:
        """Return the submodules that are kept so far, with the results of their calls."""
        kept = [KeptModule(path, self._modules[path]) for path in self._paths()]
        if not kept:
            return KeptModules(unrolls=self._unrolls)
        failure: Exception | None = None
        for fixed in (False, True):  # perhaps it is a model for one batch size
            effects = SideEffects(self._wrapper, self._named)
            samples = example(size if fixed else _MAX_SAMPLES)
            batches = {
                rows: pytree.tree_map_only(Tensor, itemgetter(slice(*rows)), samples)
                for rows in ([(0, size)] if fixed else _SAMPLES)
            }
            try:
                _observe_calls(self._wrapper, kept, effects, batches, self._make)
                return KeptModules(kept, fixed, self._unrolls, effects.states.read)
            except CaptureError:
                raise
            except Exception as error:
                failure = error
        assert failure is not None
        explained = explain(failure)
        if self._kept_around(self._path(culprit(failure))) is not None:
            explained.keep = Keep.NOTHING
        # Else it is a model without memory, which shows its further faults only now.
        raise explained from failure

    def _keep(self, error: RefusedError) -> None:
        """Keep the submodule in which an export failed, or the one around it if that is not enough.

        Raises:
            RefusedError: the same, if there is none.
        """
        part = error.part
        if part is None or part == "":  # a module may have a length, and be empty
            part = culprit(error)
        path = part if isinstance(part, str) else self._path(part)
        kept = self._kept_around(path)
        if kept is not None:
            path = kept.rpartition(".")[0]
            while isinstance(self._modules.get(path), nn.ModuleList | nn.ModuleDict):
                path = path.rpartition(".")[0]
        loops = error.refusal is Refusal.LOOP
        if loops and not self._may_be_kept(path, error):
            self._unrolls = True
            self._notify(
                f"capturing a long loop{error.place}, which takes minutes; to shorten it, "
                f"{AS_IT_IS}"
            )
            return
        if error.keep is Keep.NOTHING or not self._may_be_kept(path, error):
            if kept in self._reasons:
                error.message += f", and {self._reasons[kept]}"
            raise error
        kind = type(self._modules[path])
        alike = [p for p, module in self._modules.items() if type(module) is kind]
        # Submodules of one class break in the same way, mostly; the second one settles it.
        again = not loops and any(other in self._reasons for other in alike)
        why = error.message.removeprefix("model: ").removeprefix("cannot be captured ")
        for other in alike if again else [path]:
            if self._may_be_kept(other, error):
                self._reasons.setdefault(other, why)

    def _paths(self) -> list[str]:
        """Return the submodules that are kept, without those inside others."""
        paths = {*self._named, *self._reasons}
        return sorted(p for p in paths if not any(p.startswith(f"{other}.") for other in paths))

    def _kept_around(self, path: str) -> str | None:
        """Return the submodule that is kept and contains a module, or is it."""
        return next((kept for kept in self._paths() if f"{path}.".startswith(f"{kept}.")), None)

    def _may_be_kept(self, path: str, error: RefusedError) -> bool:
        if path == _ROOT:
            return error.keep is Keep.WHOLE or self._is_of_a_library
        return path == "loss" or (path in self._modules and in_model(path))

    def _path(self, module: nn.Module | None) -> str:
        return "" if module is None else self._path_of.get(id(vars(module)), "")


class KeptModule:
    """A submodule that becomes one operator for each of its calls.

    Args:
        path: in the wrapper.

    Attributes:
        outlines: of the results of its calls in a forward, in order.
        constants: Python state that every call sets to the same.
    """

    def __init__(self, path: str, module: nn.Module) -> None:
        self.path, self.module = path, module
        self.outlines: Sequence[Outline] = ()
        self.constants: Collection[Entry] = ()
        self._states = States(module, path)
        write_buffers_once(module)

    @contextmanager
    def observed(self, make: Make, calls: list[Outline], effects: SideEffects) -> Iterator[None]:
        """Store the outline of the result of every call, which is like that on a stage."""
        states, count = self._states, len(self._states.names)
        generators = [*SHARED_GENERATORS, *own_generators(self.module)]
        hidden: dict[int, tuple[Tensor, Tensor]] = {}  # buffers, each with what stands for it

        def take_back() -> None:
            now = states.now()
            states.assign({i: own for i, (own, other) in hidden.items() if now[i] is other})
            hidden.clear()

        def call(*args: Any, **kwargs: Any) -> Any:
            take_back()
            with self._as_refusal():
                arguments = Arguments(args, kwargs)
                inputs = [*states.now(), *arguments.tensors]
                lent = [_lent(make(tensor)) for tensor in inputs[:count]]
                tensors = [*lent, *map(_sample, inputs[count:])]
                given = [*tensors[count:], *(tensors[i] for i in states.parameters)]
                watched = effects.states.of_call(self.path, given)
                copies = _copies(tensors[count:])
                versions = [version_of(tensor) for tensor in tensors]
                random, noticed = [*map(generator_state, generators)], list[Any]()
                drawn = states_of(generators)
                note = partial(noticed.append, None)

                nodes = count_nodes()

                def run(given: Sequence[Tensor]) -> tuple[Any, ...]:
                    args, kwargs = arguments.filled(given)
                    with uncompiled():
                        called = states.call_module(tensors[:count], args, kwargs, watched)
                    arguments.check(args, kwargs, given)
                    return called

                def again() -> tuple[Any, ...]:
                    for generator, state in zip(generators, random, strict=True):
                        set_state(generator, state)
                    return run([*map(_sample, _copies(copies))])

                once = Call(self.path, partial(run, tensors[count:]), again)
                parameters = {states.names[i]: tensors[i] for i in states.parameters}
                with (
                    mask.take_off(),
                    watched_seeds(note),
                    watched_entropy(note),
                    refused_changes(self.path, parameters),
                ):
                    result, buffers, written, trained = effects.watched(once)
                written |= {i for i, t in enumerate(tensors) if version_of(t) != versions[i]}
                draws = bool(noticed) or states_of(generators) != drawn
                outline = Outline.of_call(result, tensors, written, draws)
                changed = (i for i, new in buffers.items() if not is_same(new, tensors[i]))
                functions = bool(functions_since(tensors_in(register_dataclasses(result)), nodes))
                calls.append(replace(outline, changed=frozenset(changed), functions=functions))
            mode = detect_fake_mode(inputs)
            if mode is None:
                for index in trained:
                    other = effects.stand_in(self.path, states.names[index], buffers[index])
                    hidden[index] = buffers[index], other
                states.assign({**buffers, **{i: other for i, (_, other) in hidden.items()}})
                return result

            def hollow(tensor: Tensor) -> Tensor:
                fake = mode.from_tensor(tensor.detach())
                return anchored(fake) if tensor.requires_grad else fake

            return pytree.tree_map_only(Tensor, hollow, result)

        mask = Mask(self.module, call)
        with mask.put_on():
            try:
                yield
            finally:
                take_back()

    def combine(self, batches: Sequence[int], runs: Sequence[Sequence[Outline]]) -> None:
        """Combine the calls of several forwards, each with another batch size.

        Raises:
            RefusedError: a result has no outline.
        """
        with self._as_refusal():
            if len({len(calls) for calls in runs}) > 1:
                raise UnsuitableError("is called more or less often, depending on the data")
            calls = zip(*runs, strict=True)
            self.outlines = [Outline.of_calls(batches, same) for same in calls]

    @contextmanager
    def recorded(
        self, wrapper: ModelWithLoss, samples: Callable[[], Any], recorder: Recorder
    ) -> Iterator[None]:
        """Record calls as operators of an export.

        Args:
            samples: returns their number.
        """
        states, inside = self._states, set(self.module.modules())
        others = (other for other in wrapper.modules() if other not in inside)
        shared = {id(buffer) for other in others for buffer in buffers_of(other).values()}
        now = states.now()
        own = {index for index in states.buffers if id(now[index]) not in shared}
        waiting = iter(self.outlines)

        def call(*args: Any, **kwargs: Any) -> Any:
            with self._as_refusal():
                outline = next(waiting, None)
                if outline is None:
                    raise UnsuitableError("is called more often than when the model runs")
                arguments = Arguments(args, kwargs)
            written = outline.written.intersection(states.buffers)
            for index in outline.changed - own - written:
                raise tie_error(states.names[index], "a buffer of another module")
            changed = sorted(own | written)  # those that the observed calls left alone, too
            tensors = [*states.now(), *arguments.tensors]

            def blanks() -> Any:
                with untouched_by_modes():
                    buffers = [torch.empty_like(tensors[index]) for index in changed]
                    return one_or_tuple([*outline.blanks(samples(), tensors), *buffers])

            operator = Opaque(self.path, self.module, states, arguments, outline, changed)
            given = (samples(), *tensors, *arguments.sizes)
            recorded = recorder.record(operator, given, {}, blanks)
            results = iter(recorded if isinstance(recorded, tuple) else [recorded])
            result = outline.result(results)
            for entry in self.constants:
                put(entry, entry.value)
            for index, value in zip(changed, results, strict=True):
                if index in written:
                    tensors[index].copy_(value)
                else:
                    states.assign({index: value})
            return result

        with Mask(self.module, call).put_on():
            yield

    @contextmanager
    def _as_refusal(self) -> Iterator[None]:
        """Turn what no operator can do into a refusal that names the submodule."""
        name = own_name(self.path)
        try:
            yield
        except UnsuitableError as error:
            raise Refusal.UNSUITABLE.error("", part=self.path, name=name, what=error) from error
        except RuntimeError as error:
            if "appears to not have been used in the graph" not in str(error):
                raise
            place = place_of(error)
            raise Refusal.DIFFERENTIATES.error(place, part=self.path, name=name) from error


def _observe_calls(
    wrapper: ModelWithLoss,
    kept: Sequence[KeptModule],
    effects: SideEffects,
    batches: Mapping[tuple[int, int], Any],
    make: Make,
) -> None:
    """Find the outlines of the results of all calls of some submodules, and what else they do.

    The model runs in its current mode once for every batch, and before on the first one if there
    are several: what is set in every forward alike has its value then. Afterwards it is as before.

    Args:
        effects: watches the calls.
        batches: (inputs, targets) by their first and last sample.

    Raises:
        RefusedError: a result has no outline, or a call does more than an operator can.
    """
    runs: list[list[list[Outline]]] = []
    buffers = [each for each in wrapper.buffers() if not is_deferred(each)]
    several = len(batches) > 1
    with torch.set_grad_enabled(wrapper.training), preserve_state(wrapper, buffers):
        for seed, batch in enumerate([*[*batches.values()][:several], *batches.values()]):
            calls: list[list[Outline]] = [[] for _ in kept]
            with ExitStack() as stack:
                for module, own in zip(kept, calls, strict=True):
                    stack.enter_context(module.observed(make, own, effects))
                is_first = several and not seed
                stack.enter_context(effects.forward(first=is_first, other_data=seed > 1))
                before = extra_states(wrapper)
                seed_everything(seed)  # another seed may give something else
                wrapper(*pytree.tree_map_only(Tensor, Tensor.clone, batch))
                refuse_extra_states(wrapper, before)
            runs.append(calls)
    sizes = [stop - start for start, stop in batches]
    for module, each in zip(kept, zip(*runs[several:], strict=True), strict=True):
        module.combine(sizes, each)
        module.constants = effects.constants.get(module.path, {}).values()


def _copies(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return copies of tensors which lie in memory as these do, to each other too."""
    storages = {storage_of(tensor): tensor.untyped_storage() for tensor in tensors}
    memories = {n: storage.clone() for n, storage in storages.items()}  # type: ignore[no-untyped-call]

    def copy(tensor: Tensor) -> Tensor:
        memory = memories[storage_of(tensor)]
        place = tensor.storage_offset(), tensor.shape, tensor.stride()
        made = torch.empty(0, dtype=tensor.dtype).set_(memory, *place)
        return made.requires_grad_(tensor.requires_grad)

    return [*map(copy, tensors)]


def _lent(tensor: Tensor) -> Tensor:
    """Return a trained parameter in other memory than the module's; any other tensor as it is."""
    if type(tensor) is not nn.Parameter or not tensor.requires_grad:
        return tensor
    copy = nn.Parameter(tensor.detach().clone())
    vars(copy).update(vars(tensor))
    return copy


def _sample(tensor: Tensor) -> Tensor:
    """Return a tensor with values and without history, as on a stage."""
    sample = tensor.detach()
    if is_deferred(tensor):
        blank = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
        sample = fill_sample(blank)
    return anchored(sample) if tensor.requires_grad else sample


@contextmanager
def recorded_calls(
    wrapper: ModelWithLoss, kept: Sequence[KeptModule], recorder: Recorder
) -> Iterator[None]:
    """Record calls of opaque submodules as single operators during an export.

    Raises:
        RefusedError: from the export, if a submodule is called more often than it was observed.
    """
    size: list[Any] = []  # of the batch

    def note_size(_: nn.Module, batch: Any) -> None:
        size[:] = [tensors_in(batch)[0].shape[0]]

    with ExitStack() as stack:
        for module in kept:
            stack.enter_context(module.recorded(wrapper, lambda: size[0], recorder))
        stack.callback(wrapper.register_forward_pre_hook(note_size).remove)
        yield
