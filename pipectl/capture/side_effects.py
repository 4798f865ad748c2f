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
from pipectl.capture.outer_state import outer_holders
from pipectl.capture.python_state import (
    MANY_STEPS,
    Entry,
    entry_of,
    is_of_torch,
    is_tensor,
    items_of,
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
        parameters: names of the trained parameters that have values, by their storages.
    """

    def __init__(self, wrapper: nn.Module, named: Collection[str]) -> None:
        self._wrapper, self._named = wrapper, named
        self.parameters = {
            storage_of(parameter): own_name(name)
            for name, parameter in wrapper.named_parameters()
            if parameter.requires_grad and not is_deferred(parameter)
        }
        self.constants: dict[str, dict[str, Entry]] = {}
        self._set: dict[str, list[tuple[Entry, Any]]] = {}
        """What submodules have set, with its stand-ins."""
        self._set_keys: dict[str, set[_Key]] = {}
        self._begin: _States = {}
        self._is_first = False
        self._known = set[tuple[Refusal, str, frozenset[str]]]()
        """What a submodule need not be refused for, with the names of the changes."""
        self._holders: list[Holder] = []
        self._in_place: list[Any] = []

    @contextmanager
    def forward(self, *, first: bool) -> Iterator[None]:
        """Watch one forward of the model.

        Args:
            first: whether what it sets may be read, as further forwards may leave it as it is.
        """
        items = [item for item in items_of(self._wrapper) if not is_of_torch(item.name)]
        self._holders = [*items, *outer_holders(self._wrapper)]  # what is new is an entry of these
        self._in_place = [item.value for item in items if type(item.value) not in CONTAINERS]
        self._in_place += SHARED_GENERATORS
        self._begin, self._is_first = self._states(), first
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
        given = call.run()
        outcome, after = _outcome(given), self._states()
        changed = _changes(before, after)
        restored: _Begin = {key: _entry(before, key) for key in changed}
        if call.path not in self._named and self._is_new(Refusal.KEPT, call, changed):
            self._refuse_kept(call, outcome, restored, after)
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
        error = partial(Refusal.LEFT.error, entry=own_name(name), name=own_name(path))
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

    def _is_new(self, refusal: Refusal, call: Call, changed: Collection[_Key]) -> bool:
        """Return whether some changes were not looked at yet for a submodule and a refusal."""
        known = refusal, call.path, frozenset(map(self._name, changed))
        is_new = bool(changed) and known not in self._known
        self._known.add(known)
        return is_new

    def _refuse_kept(self, call: Call, outcome: Any, before: _Begin, after: _States) -> None:
        """Refuse a call that would give something else after this one, or after many.

        Raises:
            RefusedError: naming what it keeps.
        """
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
        entry = own_name(self._name(key))
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
                if not (is_pythons or isinstance(value, Iterator)):
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


class WatchedParameters(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Refuses operators on trained parameters that a call has not got.

    Args:
        path: of the submodule that is called.
        names: of all trained parameters, by their storages.
        given: what the call has got.
    """

    supports_higher_order_operators = True

    def __init__(self, path: str, names: Mapping[int, str], given: Iterable[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        got = {storage_of(each) for each in given if each.layout is torch.strided}
        self._path = path
        self._names = {storage: name for storage, name in names.items() if storage not in got}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for tensor in tensors_in((args, kwargs)):
            name = self._names.get(storage_of(tensor)) if tensor.layout is torch.strided else None
            if name is not None:
                raise Refusal.OUTER_PARAMETER.error(module=own_name(self._path), name=name)
        return func(*args, **(kwargs or {}))


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
