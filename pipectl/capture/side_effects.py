"""What a submodule that is kept whole does besides giving its results.

As one operator it gets its arguments and gives its results, nothing else. Python state that it sets
reaches no other operator, which may run on another rank; nor does state that others set reach the
submodule. What it keeps for itself from call to call is in no checkpoint, and a forward that is
recomputed changes it twice.

So calls are watched while the model runs as it is. In the place of what one has set are stand-ins,
until the next call of the same submodule: who reads one is refused. A call that has changed state,
or that finds what others have changed, is made once more without that: its result must be the same.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from pipectl.capture.model_with_loss import own_name, register_dataclasses
from pipectl.capture.operators import written_tensors
from pipectl.capture.outer_state import outer_holders
from pipectl.capture.python_state import (
    MANY_STEPS,
    UNSET,
    Entry,
    entry_of,
    is_of_states,
    is_tensor,
    is_watched,
    items_of,
    name_of_state,
    pairs_of,
    put,
    stand_in,
)
from pipectl.capture.randomness import SHARED_GENERATORS
from pipectl.capture.refusals import Refusal, RefusedError
from pipectl.capture.tensors import is_deferred, is_equal, octets_of, storage_of, tensors_in
from pipectl.objects import CONTAINERS, Holder, restore_of
from pipectl.torch_api import (
    CALL_OF_A_MODULE,
    TorchDispatchMode,
    buffers_of,
    has_gradient_hooks,
    identity_of,
    pytree,
    version_of,
)

_SKIPPED = {*vars(nn.Module()), "forward", CALL_OF_A_MODULE}
"""Attributes of all modules, and those by which calls of a submodule are watched."""
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class _State(NamedTuple):
    """An entry at some time. A tensor may be written in place."""

    entry: Entry
    version: int

    def is_as(self, other: _State | None) -> bool:
        if other is None or self.version != other.version:
            return False
        return self.entry.is_like(other.entry)


_Key = tuple[int, Any]
"""Of an entry: the place of its holder in the list of all, and its key there."""
_States = Mapping[_Key, _State]
_Begin = Mapping[_Key, Entry | None]
"""Entries, None for one that is absent."""


class Call(NamedTuple):
    """A call of a submodule.

    Args:
        path: of the submodule in the wrapper.
        run: makes it and returns what it gives.
        again: makes it once more, with the same arguments and random numbers.
    """

    path: str
    run: Callable[[], tuple[Any, ...]]
    again: Callable[[], tuple[Any, ...]]


class SideEffects:
    """Watches calls while a model runs on several batches, one after another.

    Args:
        named: paths of the submodules that may keep state, because the user has named them.

    Attributes:
        constants: what the calls of a submodule have set in the first forward and leave as it is in
            further ones, by path and name.
        states: watches what calls do to parameters and buffers that they have not got.
    """

    def __init__(self, wrapper: nn.Module, named: Collection[str]) -> None:
        self._wrapper, self._named = wrapper, named
        self.states = OuterStates(wrapper)
        self._paths = {path for path, _ in wrapper.named_modules()}
        self._buffers = {
            (id(buffers_of(module)), name)
            for module in wrapper.modules()
            for name, buffer in buffers_of(module).items()
            if buffer is not None
        }
        """Those that are given to the calls."""
        self._earlier: dict[str, dict[str, Entry | None]] = {}
        """What submodules have set, as it was before they did so first."""
        self.constants: dict[str, dict[str, Entry]] = {}
        self._set: dict[str, list[tuple[Entry, Any]]] = {}
        """What submodules have set, with its stand-ins."""
        self._set_keys: dict[str, set[_Key]] = {}
        self._begin: _States = {}
        self._is_first = False
        self._has_other_data = False
        self._known = set[tuple[Refusal, str, bool, frozenset[str]]]()
        """What a submodule need not be refused for, with the names of the changes."""
        self._holders: list[Holder] = []
        self._in_place: list[Any] = []

    @contextmanager
    def forward(self, *, first: bool, other_data: bool) -> Iterator[None]:
        """Watch one forward of the model.

        Args:
            first: whether what it sets may be read, as further forwards may leave it as it is.
            other_data: whether it gets another batch than the first one.
        """
        items = [item for item in items_of(self._wrapper) if is_watched(item.name)]
        self._holders = [*items, *outer_holders(self._wrapper)]  # what is new is an entry of these
        self._in_place = [item.value for item in items if type(item.value) not in CONTAINERS]
        self._in_place += SHARED_GENERATORS
        self._begin, self._is_first = self._states(), first
        self._has_other_data = other_data
        self._set_keys.clear()
        try:
            yield
        finally:
            for path in [*self._set]:
                self._take_back(path)

    def watched(self, call: Call) -> tuple[Any, ...]:
        """Make a call, and return what it gives.

        Raises:
            RefusedError: it keeps state for further calls, or needs what others have set.
        """
        self._take_back(call.path)
        before = self._states()
        with self.states.watched(call.path):
            given = call.run()
        outcome, after = _outcome(given), self._states()
        changed = _changes(before, after)
        restored: _Begin = {key: _entry(before, key) for key in changed}
        earlier = self._earlier_entries(call.path, after)
        kept = {**restored, **earlier}
        if call.path not in self._named and self._is_new(Refusal.KEPT, call, kept):
            self._refuse_kept(call, outcome, restored, after)
            self._refuse_earlier(call, outcome, earlier)
        for key in changed:
            self._earlier.setdefault(call.path, {}).setdefault(self._name(key), restored[key])
        own = self._set_keys.setdefault(call.path, set())
        others = [key for key in _changes(self._begin, before) if key not in own]
        if self._is_new(Refusal.SET_OUTSIDE, call, others):
            self._refuse_set_outside(call, outcome, restored, others)
        own.update(changed)
        self._leave(call.path, {self._name(k): after[k].entry for k in changed if k in after})
        return given

    def stand_in(self, path: str, name: str, value: Any) -> Any:
        """Return what stands for a value that a submodule has set, for all others."""
        if self._is_first:
            return value
        entry = own_name(name_of_state(name))
        error = partial(Refusal.LEFT.error, entry=entry, name=own_name(path))
        return stand_in(value, error)

    def _leave(self, path: str, entries: Mapping[str, Entry]) -> None:
        """Put stand-ins in the place of what a call has set."""
        if self._is_first:
            self.constants.setdefault(path, {}).update(entries)
            return
        for name, entry in entries.items():
            for constants in self.constants.values():
                constants.pop(name, None)
            other = self.stand_in(path, name, entry.value)
            put(entry, other)
            self._set.setdefault(path, []).append((entry, other))

    def _take_back(self, path: str) -> None:
        """Put what a submodule has set in the place of its stand-ins."""
        for entry, other in self._set.pop(path, []):
            with suppress(KeyError, IndexError):  # it is gone
                if entry.holder[entry.key] is other:
                    put(entry, entry.value)

    def _name(self, key: _Key) -> str:
        return self._holders[key[0]].name_of(key[1])

    def _earlier_entries(self, path: str, now: _States) -> dict[_Key, Entry | None]:
        """Return what a submodule has set in earlier forwards, as it was before."""
        earlier = self._earlier.get(path)
        if not earlier:
            return {}
        names = ((key, self._name(key)) for key in now)
        return {key: earlier[name] for key, name in names if name in earlier}

    def _is_new(self, refusal: Refusal, call: Call, changed: Collection[_Key]) -> bool:
        """Return whether some changes were not looked at yet for a submodule and a refusal, on the
        data of the first forward or on others.
        """
        names = frozenset(map(self._name, changed))
        known = refusal, call.path, self._has_other_data, names
        is_new = bool(changed) and known not in self._known
        self._known.add(known)
        return is_new

    def _refuse_kept(self, call: Call, outcome: Any, before: _Begin, after: _States) -> None:
        """Refuse a call that would give something else after this one, or after many.

        Raises:
            RefusedError: naming what it keeps.
        """
        if not before:
            return
        begin: _Begin = {key: _entry(after, key) for key in before}
        if not self._differs(call, outcome, {}):
            twice: list[_Key] = []
            with self._preserved(), suppress(Exception):
                call.again()
                twice = _changes(after, self._states())
            begin = _later(before, begin, twice)
            if not begin or not self._differs(call, outcome, begin):
                return

        def alone(key: _Key) -> bool:
            return self._differs(call, outcome, {**before, key: begin[key]})

        self._refuse(call, Refusal.KEPT, next(filter(alone, begin), next(iter(begin))))

    def _refuse_earlier(self, call: Call, outcome: Any, earlier: _Begin) -> None:
        """Refuse a call that would give something else without what earlier ones have set once.

        Raises:
            RefusedError: naming that.
        """
        if earlier and self._differs(call, outcome, earlier):
            self._refuse(call, Refusal.KEPT, next(iter(earlier)))

    def _refuse_set_outside(
        self, call: Call, outcome: Any, before: _Begin, others: list[_Key]
    ) -> None:
        """Refuse a call that would give something else without what others have set.

        Raises:
            RefusedError: naming that.
        """
        begin = {key: _entry(self._begin, key) for key in others}
        keeps_state = self._differs(call, outcome, before)
        if keeps_state or not self._differs(call, outcome, {**before, **begin}):
            return

        def alone(key: _Key) -> bool:
            return self._differs(call, outcome, {**before, key: begin[key]})

        self._refuse(call, Refusal.SET_OUTSIDE, next(filter(alone, begin), others[0]))

    def _refuse(self, call: Call, refusal: Refusal, key: _Key) -> None:
        """Refuse a call, if possible at the line that reads an entry."""
        name = self._name(key)
        entry = own_name(name_of_state(name))
        words = {"part": call.path, "entry": entry, "name": own_name(call.path)}
        error = refusal.error("", **words)
        now = _entry(self._states(), key)
        if now is not None:
            put(now, stand_in(now.value, partial(refusal.error, **words)))
            try:
                call.again()
            except RefusedError as located:
                error = located
            except Exception:  # without a line
                pass
            finally:
                put(now, now.value)
        is_registered = name_of_state(name).rpartition(".")[0] in self._paths
        if refusal is Refusal.KEPT and is_of_states(name) and is_registered:
            error.hint = UNSET
        raise error

    def _differs(self, call: Call, outcome: Any, begin: _Begin) -> bool:
        """Return whether a call gives something else if some entries are others before.

        What differs from call to call anyway tells nothing.
        """
        found: list[Any] = []
        while len(found) < 2:
            with self._preserved():
                self._restore(begin)
                try:
                    found.append(_outcome(call.again()))
                except Exception:
                    found.append(None)
            if _is_same(found[-1], outcome):
                return False
        return _is_same(*found)

    @contextmanager
    def _preserved(self) -> Iterator[None]:
        """Restore all state that calls may change."""
        before = self._states()
        restores = [restore_of(value) for value in self._in_place]
        try:
            yield
        finally:
            for restore in restores:
                with suppress(RuntimeError, TypeError, ValueError):  # it takes no values
                    restore()
            self._restore({k: _entry(before, k) for k in _changes(before, self._states())})

    def _restore(self, begin: _Begin) -> None:
        now = self._states() if None in begin.values() else {}
        gone = [now[k].entry for k, entry in begin.items() if entry is None and k in now]
        for entry in sorted(gone, key=lambda e: e.key if isinstance(e.key, int) else 0)[::-1]:
            with suppress(KeyError, IndexError, AttributeError, TypeError):
                del entry.holder[entry.key]
        for present in filter(None, begin.values()):
            with suppress(KeyError, IndexError, AttributeError, TypeError, ValueError):
                put(present, present.value)
                if present.content is not None:
                    present.value[...] = present.content

    def _states(self) -> _States:
        """Return all that calls may change, but for iterators and what Python itself sets."""
        states: dict[_Key, _State] = {}
        for place, holder in enumerate(self._holders):
            pairs = pairs_of(holder)
            if holder.owner is not None:
                pairs = [(key, value) for key, value in pairs if key not in _SKIPPED]
            for key, value in pairs:
                is_pythons = holder.owner is not None and str(key).startswith("__")
                is_given = (id(holder.value), key) in self._buffers
                if not (is_pythons or is_given or isinstance(value, Iterator)):
                    version = version_of(value) if is_tensor(value) else 0
                    states[place, key] = _State(entry_of(holder, key, value), version)
        return states


def _entry(states: _States, key: _Key) -> Entry | None:
    return states[key].entry if key in states else None


def _changes(before: _States, after: _States) -> list[_Key]:
    """Return the keys of entries that are not as before, in order."""
    keys = dict.fromkeys((*before, *after))
    return [k for k in keys if k not in after or not after[k].is_as(before.get(k))]


def _later(before: _Begin, after: _Begin, twice: Collection[_Key]) -> dict[_Key, Entry]:
    """Return the numbers that grow with every call as they are after many."""
    found = {}
    for key in twice:
        old, new = before.get(key), after.get(key)
        if old is not None and new is not None:
            later = new._replace(old=old.plain).after(MANY_STEPS)
            if later is not None:
                found[key] = later
    return found


def _outcome(given: tuple[Any, ...]) -> Any:
    """Return what a call gives in a form that stays, to be compared."""
    leaves, structure = pytree.tree_flatten(register_dataclasses(given))
    return [
        each.detach().clone() if isinstance(each, Tensor) else each for each in leaves
    ], structure


def _is_same(one: Any, other: Any) -> bool:
    """Return whether two outcomes are equal; None is that of a call that has failed."""
    if one is None or other is None:
        return one is other
    return one[1] == other[1] and all(map(_is_alike, one[0], other[0]))


def _is_alike(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return is_equal(one, other)
    return one is other or (type(one) is type(other) and bool(one == other))


@contextmanager
def refused_changes(path: str, parameters: Mapping[str, Tensor]) -> Iterator[None]:
    """Refuse what a call does to parameters, which no graph shows.

    Args:
        path: of the submodule that is called.
        parameters: of it by name, as it gets them.

    Raises:
        RefusedError: naming the submodule.
    """
    before = [_parameter_state(parameter) for parameter in parameters.values()]
    yield
    place = f" of {own_name(path)}"
    for (name, parameter), old in zip(parameters.items(), before, strict=True):
        now = _parameter_state(parameter)
        if now == old:
            continue
        if now.is_trained is not old.is_trained:
            parameter.requires_grad_(old.is_trained)
            raise Refusal.FREEZES.error(place)
        if now.gradient != old.gradient:
            parameter.grad = None
            raise Refusal.BACKWARD.error(place)
        if now.has_hooks is not old.has_hooks:
            subject = f"{own_name(path)} puts a hook on the gradient of the parameter {name}"
            raise Refusal.GRADIENT_HOOK.error("", subject=subject, why=_EVERY_CALL)
        if now.values != old.values and now.version == old.version:
            raise Refusal.PARAMETER_WRITTEN.error("", name=name)


class OuterStates:
    """Watches what calls do to parameters and buffers that they have not got.

    A stage gives them those of its own step, which only its modules hold.

    Attributes:
        read: the buffers that calls read in such a way, by full name, each with the refusal for it
            if a forward changes it.
    """

    def __init__(self, wrapper: nn.Module) -> None:
        self._wrapper = wrapper
        self._known: dict[int, tuple[str, Tensor]] = {}
        """By storage; also those that another tensor has replaced."""
        self._buffers = [name for name, _ in wrapper.named_buffers(remove_duplicate=False)]
        self._names = {*dict(wrapper.named_parameters()), *self._buffers}
        self.read: dict[str, RefusedError] = {}

    def of_call(self, path: str, given: Iterable[Tensor]) -> WatchedStates:
        """Return what watches the operators of a call.

        Args:
            path: of the submodule that is called.
            given: what the call has got; of its buffers it gets copies.
        """
        states = {**dict(self._wrapper.named_parameters()), **dict(self._wrapper.named_buffers())}
        for name, state in ((n, s) for n, s in states.items() if n in self._names):
            is_frozen = isinstance(state, nn.Parameter) and not state.requires_grad
            has_values = is_tensor(state) and not is_deferred(state)
            if has_values and not is_frozen and state.layout is torch.strided:
                self._known.setdefault(storage_of(state), (name, state))
        got = {storage_of(each) for each in given if each.layout is torch.strided}
        others = {storage: pair for storage, pair in self._known.items() if storage not in got}
        return WatchedStates(path, others, self.read)

    @contextmanager
    def watched(self, path: str) -> Iterator[None]:
        """Refuse a call that assigns a buffer of another module.

        Args:
            path: of the submodule that is called.
        """
        before = dict(self._wrapper.named_buffers(remove_duplicate=False))
        yield
        now = dict(self._wrapper.named_buffers(remove_duplicate=False))
        for name in self._buffers:
            if now.get(name) is not before.get(name):
                raise _outer_buffer(path, name, "assigns", "")


def _outer_buffer(path: str, name: str, does: str, place: str | None = None) -> RefusedError:
    return Refusal.OUTER_BUFFER.error(place, module=own_name(path), name=own_name(name), does=does)


class WatchedStates(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Refuses operators on trained parameters, and writes to buffers, that a call has not got.

    Args:
        path: of the submodule that is called.
        states: all of them by storage, with their full names.
        read: notes buffers; see :class:`OuterStates`.
    """

    supports_higher_order_operators = True

    def __init__(
        self,
        path: str,
        states: Mapping[int, tuple[str, Tensor]],
        read: dict[str, RefusedError],
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._path, self._states, self._read = path, states, read

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for tensor in tensors_in((args, kwargs)):
            found = self._states.get(storage_of(tensor)) if tensor.layout is torch.strided else None
            if found is not None:
                name, state = found
                if isinstance(state, nn.Parameter):
                    name, module = own_name(name), own_name(self._path)
                    raise Refusal.OUTER_PARAMETER.error(module=module, name=name)
                written = written_tensors(func, args, kwargs, statistics=True)
                if any(tensor is each for each in written):
                    raise _outer_buffer(self._path, name, "writes")
                if name not in self._read:
                    self._read[name] = _outer_buffer(self._path, name, "reads")
        return func(*args, **kwargs)


_EVERY_CALL = "once more in every call"


class _ParameterState(NamedTuple):
    is_trained: bool
    gradient: tuple[int, int]
    has_hooks: bool
    values: int
    version: int


def _parameter_state(parameter: Tensor) -> _ParameterState:
    gradient = (0, 0)
    if parameter.grad is not None:
        gradient = identity_of(parameter.grad), version_of(parameter.grad)
    octets = torch.from_numpy(octets_of(parameter))
    width = next(size for size in (8, 4, 2, 1) if not len(octets) % size)
    values = int(octets.view(_INTEGERS[width]).sum(dtype=torch.int64))
    return _ParameterState(
        parameter.requires_grad,
        gradient,
        has_gradient_hooks(parameter),
        values,
        version_of(parameter),
    )
