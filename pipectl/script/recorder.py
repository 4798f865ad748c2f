"""Records what a script computes between a batch of its ``DataLoader`` and ``backward()``.

A torch function mode sees every function of torch that the script calls: operators, methods,
indexing, in-place operators, functions that make tensors. A call is recorded if it reads something
of a batch, or makes a tensor once a batch is there. A call of a module that has parameters is one
entry, whatever happens in it. Sizes of tensors, and numbers taken out of them, stay connected by
:mod:`~pipectl.script.numbers`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from pipectl.errors import CaptureError
from pipectl.faults import is_user_code
from pipectl.script.numbers import traced
from pipectl.script.order import SharedGenerators
from pipectl.script.program import (
    BATCH,
    DEVICE,
    Entry,
    Holder,
    Outer,
    Place,
    Program,
    Ref,
    as_given,
    attributes_of,
    leaves_of,
    parts,
    plain_number,
    rebuilt,
)

_SIZES = {"size", "shape", "__len__", "numel", "nelement", "dim", "ndim"}
_VALUES = {"item"}
_LEAVES = {
    "numpy", "tolist", "__array__", "__bool__", "__contains__", "__float__", "__int__", "__index__",
}  # fmt: skip
"""Methods through which values of tensors reach Python; of the last ones Python forgets where they
are from."""
_MOVES = {"to", "cuda", "cpu", "pin_memory", "type_as"}
_MAKES = {
    "arange", "bernoulli", "empty", "empty_like", "eye", "full", "full_like", "linspace",
    "multinomial", "normal", "ones", "ones_like", "rand", "rand_like", "randint", "randint_like",
    "randn", "randn_like", "randperm", "tensor", "as_tensor", "from_numpy", "zeros", "zeros_like",
    "tril", "triu", "tril_indices", "triu_indices", "new_zeros", "new_ones", "new_full",
}  # fmt: skip
_DRAWS = {
    "bernoulli", "bernoulli_", "dropout", "multinomial", "normal", "normal_", "rand", "rand_like",
    "randint", "randint_like", "randn", "randn_like", "randperm", "uniform_", "exponential_",
    "random_", "sample", "gumbel_softmax",
}  # fmt: skip
_ZEROES = {"zero_", "_foreach_zero_", "fill_"}
"""Functions that set tensors to zero, ``fill_`` if it is told to."""
_ELSEWHERE = {"cuda", "mps", "xpu", "hip", "npu", "hpu"}
_SHAPED = {
    "view", "reshape", "expand", "zeros", "ones", "full", "empty", "rand", "randn", "arange",
    "new_zeros", "new_ones", "new_full", "unflatten",
}  # fmt: skip
"""Functions that take a shape, or a number of samples."""
_NO_VALUES = ("grad", "requires_grad")
"""Attributes of tensors; to set them changes no value."""
_SMALLEST_BATCH = 2
_OF_A_STEP = (
    "_iterator", "_entries", "_results", "_refs", "_batches", "_storages", "_autocast", "_before",
    "_modes",
)  # fmt: skip
"""What the recorder knows of a step that it records."""
_KEPT_BATCHES = 4


def script_place() -> Place:
    """Return the innermost line of user code that is being run; ("", 0) if there is none."""
    return next(script_places(), ("", 0))


def script_places() -> Iterator[Place]:
    """Yield the lines of user code that are being run, innermost first."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if is_user_code(frame.f_code.co_filename):
            yield frame.f_code.co_filename, frame.f_lineno
        frame = frame.f_back


def at(place: Place) -> str:
    """Return a place for a message."""
    return f"{place[0]}:{place[1]}" if place[0] else "the script"


@dataclass
class Before:
    """What a step reads and writes besides its batch, as it was before the step.

    Args:
        generators: of random numbers.
        buffers: copies of the buffers of called modules.
    """

    generators: SharedGenerators = field(default_factory=SharedGenerators)
    buffers: dict[Tensor, Tensor] = field(default_factory=dict)

    def note(self, module: nn.Module) -> None:
        """Copy the buffers of a module before it is called."""
        _copy_buffers(module, self.buffers)

    def restore(self) -> None:
        """Set all back."""
        self.generators.restore()
        with torch.no_grad():
            for buffer, value in self.buffers.items():
                buffer.copy_(value)


@dataclass
class Recording:
    """What leads to one ``backward()``.

    Args:
        entries: all calls since the batch, also those that do not matter to the loss.
        loss: the value that ``backward()`` was called on.
        value: the value of the loss.
        batches: numbers of the batches that the calls read; in ``entries`` each is ``BATCH``.
        modules: that were called, with whether each was in training mode before its first call.
        place: of ``backward()``.
        results: of the entries that call modules.
        batch: what the loader gave.
        autocast: the type that the modules' autocast computes with; None without it.
        before: what was there before; only of a recorder that follows.
        draws: whether random numbers have been drawn since.
        places: the lines of the script that were being run, innermost first.
    """

    entries: list[Entry]
    loss: Ref
    value: Tensor
    batches: list[int]
    place: Place
    batch: Any = None
    results: dict[int, Any] = field(default_factory=dict)
    autocast: torch.dtype | None = None
    before: Before | None = None
    draws: bool = False
    places: tuple[Place, ...] = ()


class Here(TorchFunctionMode):
    """Lets torch compute on the CPU where a script names an accelerator."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Call a function of torch."""
        if getattr(func, "__name__", "") in _ELSEWHERE:  # tensor.cuda()
            return args[0]
        return func(*map(plain_device, args), **_here(dict(kwargs or {})))


class Recorder(TorchFunctionMode):
    """Records the steps of a script that runs within it.

    Args:
        follows: whether steps are to be run again, so that what is there before each is kept.

    Attributes:
        recordings: one for every ``backward()``.
        training: whether each module was in training mode before it was called in a step.
        buffers: copies of the buffers of called modules, from before their first call.
        decisions: lines that look at values of tensors.
        written: memory that is written outside of modules after the first ``backward()``, with the
            line; only of a recorder that follows.
        gradients: the memory of gradients, which nobody can write.
        zeroed: that of those that were to be set to zero.
    """

    def __init__(self, *, follows: bool = False) -> None:
        super().__init__()
        self.follows = follows
        self.written: dict[int, Place] = {}
        self.gradients: set[int] = set()
        self.zeroed: set[int] = set()
        self.recordings: list[Recording] = []
        self.training: dict[nn.Module, bool] = {}
        self.buffers: dict[Tensor, Tensor] = {}
        self.decisions: list[Place] = []
        self.waived: set[int] = set()
        self._depth = 0
        self._iterator: object = None
        self._clear()

    def _clear(self) -> None:
        self._paused: dict[str, Any] | None = None
        self._entries: list[Entry] = []
        self._results: dict[int, Any] = {}
        self._refs: dict[int, tuple[Any, Ref]] = {}
        self._batches: dict[int, Any] = {}
        self._storages: dict[int, int] = {}
        self._autocast: torch.dtype | None = None
        self._before: Before | None = None
        self._modes: dict[nn.Module, bool] = {}

    # What the hooks tell it.

    def batch(self, number: int, batch: Any, iterator: object) -> None:
        """Note a batch that a loader has given."""
        if iterator is not self._iterator or not torch.is_grad_enabled():
            paused = self._paused or {k: vars(self)[k] for k in _OF_A_STEP if self._batches}
            self._clear()
            self._iterator = iterator
            if not torch.is_grad_enabled():  # an evaluation: the step may go on after it
                self._paused = paused or None
        if len(self._batches) >= _KEPT_BATCHES and not self._entries:
            self._clear()
        self._add_batch(number, batch)

    def _go_on(self) -> None:
        """Return to the step that an evaluation without gradients has interrupted."""
        if self._paused is not None and torch.is_grad_enabled():
            vars(self).update(self._paused)
            self._paused = None

    def _add_batch(self, number: int, batch: Any) -> None:
        self._batches[number] = as_given(batch)
        entry = BATCH - len(self._batches) + 1  # -1, -2, ...
        for path, tensor in leaves_of(batch):
            self._remember(tensor, Ref(entry, path))

    def call_module(
        self, call: Callable[..., Any], module: nn.Module, args: Any, kwargs: Any
    ) -> Any:
        """Call a module that is not within another one."""
        self._go_on()
        is_recorded = self._depth == 0 and (self._batches or _has_grad(module))
        if not is_recorded or next(module.parameters(), None) is None:
            return call(module, *args, **kwargs)
        place = script_place()
        self._note_state(module)
        if (before := self._begun()) is not None:
            before.note(module)
        if self._autocast is None and torch.is_autocast_enabled("cpu"):
            self._autocast = torch.get_autocast_dtype("cpu")
        packed_args, packed_kwargs = self._pack(args), self._pack(kwargs)
        self._depth += 1
        try:
            result = call(module, *args, **kwargs)
        finally:
            self._depth -= 1
        self._append(Entry(module, packed_args, packed_kwargs, place), result)
        self._results[len(self._entries) - 1] = result
        return result

    def backward(self, loss: Tensor) -> None:
        """Note that ``backward()`` is called."""
        place = script_place()
        found = self._refs.get(id(loss))
        if found is None or not self._entries:
            raise _backward_of_nothing(place, self.recordings, is_again=not self._batches)
        entries = self._entries
        needed = [entries[index] for index in Program(entries, found[1]).needed]
        used = {ref.entry for entry in needed for ref in entry.refs if ref.entry < 0}
        order = list(self._batches)
        numbers = [order[BATCH - entry] for entry in sorted(used, reverse=True)]
        if len(used) == 1 and used != {BATCH}:
            (other,) = used
            entries = [_with_batch(entry, other) for entry in entries]
        self.recordings.append(
            Recording(
                entries,
                found[1],
                loss.detach().clone(),
                numbers,
                place,
                self._batches[numbers[0]] if numbers else None,
                self._results,
                self._autocast,
                self._before,
                self._before is not None and self._before.generators.have_drawn(),
                tuple(script_places()),
            )
        )
        for module, is_training in self._modes.items():
            self.training.setdefault(module, is_training)
        ahead = [(n, batch) for n, batch in self._batches.items() if numbers and n > numbers[-1]]
        self._clear()
        for number, batch in ahead if self.follows else ():
            self._add_batch(number, batch)

    # What the script computes.

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Call a function of torch, and record it."""
        self._go_on()
        kwargs = _here(dict(kwargs or {}))
        args = tuple(plain_device(arg) for arg in args)
        if getattr(func, "__name__", "") in _ELSEWHERE:  # tensor.cuda()
            return args[0]
        if getattr(func, "__name__", "") in _ZEROES and self._zeroes_gradients(args):
            return args[0]
        if self.follows and self.recordings and not self._depth:
            self._note_write(func, args)
        if self._depth or not (self._batches or self._entries):
            return func(*args, **kwargs)
        name = _name_of(func)
        if name in ("backward", "__hash__", "register_hook", "retain_grad"):
            return func(*args, **kwargs)
        if name == "__iter__":
            return iter(torch.unbind(args[0]))
        if not any(map(self._is_known, parts((args, kwargs)))) and name not in _MAKES:
            return func(*args, **kwargs)
        return self._record(func, name, args, kwargs)

    def _record(self, func: Any, name: str, args: Any, kwargs: dict[str, Any]) -> Any:
        packed_args, packed_kwargs = self._pack(args), self._pack(kwargs)
        if name in _SHAPED:
            packed_args = self._with_size(packed_args)
        place = script_place()
        self._begun()
        result = func(*args, **kwargs)
        if name in _LEAVES:
            self.decisions.append(place)
            return result
        if name in _MOVES and any(result is arg for arg in args):
            return result
        tensors = list(leaves_of(list(result) if isinstance(result, set) else result))
        if not tensors and name not in _SIZES | _VALUES and not _writes(name):
            return result
        writes: frozenset[int] = frozenset()
        if _writes(name) or "out" in kwargs:
            written = kwargs.get("out", args[0] if args else None)
            found = self._refs.get(id(written))
            if found is None and isinstance(written, Tensor) and tensors:
                return result  # a tensor of the script's own, which it adds up results in
            own = memory_of(written)
            if any(own == memory_of(each) for each in self._batch_tensors()):
                raise CaptureError(
                    f"{at(place)}: writes into a tensor of the batch",
                    hint="write into a copy: x = x.clone()",
                )
            writes = frozenset(i for i, place in self._storages.items() if place == own)
        entry = Entry(
            func,
            packed_args,
            packed_kwargs,
            place,
            with_grad=torch.is_grad_enabled(),
            autocast=torch.is_autocast_enabled("cpu"),
            is_random=name in _DRAWS and kwargs.get("training", True) is not False,
            writes=writes,
        )
        index = self._append(entry, result)
        if name in _SIZES | _VALUES:
            return self._numbers(result, index)
        return result

    def _zeroes_gradients(self, args: Any) -> bool:
        """Note the gradients that a function sets to zero; whether there are any."""
        if not all(isinstance(value, int | float) and not value for value in args[1:]):
            return False
        found = {memory_of(each) for _, each in leaves_of(args[0])} & self.gradients
        self.zeroed |= found
        return bool(found)

    def _note_write(self, func: Any, args: Any) -> None:
        """Note what a function writes, weights for example."""
        if getattr(getattr(func, "__self__", None), "__name__", "") in _NO_VALUES:
            return
        if args and _writes(_name_of(func)):
            # module.to(device) sets what is there already.
            read = [] if func.__name__ != "__set__" else [memory_of(each) for each in args[1:]]
            for _, tensor in leaves_of(args[0]):
                if (memory := memory_of(tensor)) and memory not in read:
                    self.written.setdefault(memory, script_place())

    def length(self, value: Any) -> int:
        """What ``len`` gives the script: the size of a batch remembers where it is from."""
        is_recorded = not self._depth and isinstance(value, Tensor) and id(value) in self._refs
        return len(value) if not is_recorded else value.size(0)

    def _with_size(self, args: Any) -> Any:
        """Arguments of a function that takes a shape, with the size of the batch in the place of an
        equal number that comes first in it: it is typed in, but means the samples.
        """
        found = next(iter(self._batch_tensors()), None)
        if found is None or not found.dim():
            return args
        start = 1 if args and isinstance(args[0], Ref | Outer) else 0
        first = args[start] if len(args) > start else None
        shape = first if isinstance(first, tuple | list) and not isinstance(first, Ref) else ()
        number = shape[0] if shape else first
        if type(number) is not int or number != found.shape[0] or number < _SMALLEST_BATCH:
            return args
        self._entries.append(Entry(Tensor.size, (self._refs[id(found)][1], 0), {}, script_place()))
        size: Any = Ref(len(self._entries) - 1)
        size = (size, *shape[1:]) if shape else size
        return (*args[:start], size, *args[start + 1 :])

    def _append(self, entry: Entry, result: Any) -> int:
        index = len(self._entries)
        entry.with_grad = torch.is_grad_enabled()
        entry.autocast = torch.is_autocast_enabled("cpu")
        self._entries.append(entry)
        for path, tensor in leaves_of(result):
            self._remember(tensor, Ref(index, path))
            if not path and tensor.layout is torch.strided:
                self._storages[index] = tensor.untyped_storage().data_ptr()
        return index

    def _numbers(self, result: Any, index: int) -> Any:
        if isinstance(result, torch.Size):
            refs = [Ref(index, (("item", i),)) for i in range(len(result))]
            return torch.Size(
                [traced(x, r, self._combine) for x, r in zip(result, refs, strict=True)]
            )
        return traced(result, Ref(index), self._combine)

    def _combine(self, function: Any, operands: tuple[Any, ...]) -> Ref | None:
        if self._depth or not self._entries:
            return None
        packed = tuple(self._pack(each) for each in operands)
        self._entries.append(Entry(function, packed, {}, script_place()))
        return Ref(len(self._entries) - 1)

    def _batch_tensors(self) -> list[Tensor]:
        return [tensor for batch in self._batches.values() for _, tensor in leaves_of(batch)]

    def _remember(self, tensor: Tensor, ref: Ref) -> None:
        self._refs[id(tensor)] = tensor, ref

    def _is_known(self, value: Any) -> bool:
        is_trained = isinstance(value, nn.Parameter) and torch.is_grad_enabled()
        return is_trained or id(value) in self._refs or plain_number(value)

    def _pack(self, value: Any) -> Any:
        return rebuilt(value, self._packed)

    def _packed(self, value: Any) -> Any:
        found = self._refs.get(id(value))
        if found is not None:
            return found[1]
        if plain_number(value):
            is_current = value.combine.__self__ is self and value.ref.entry < len(self._entries)
            return value.ref if is_current else type(value).__mro__[2](value)
        if isinstance(value, Tensor):
            return Outer(value)
        held = {
            name: self._pack(item)
            for name, item in attributes_of(value).items()
            if any(id(tensor) in self._refs for _, tensor in leaves_of(item, around=(value,)))
        }
        if held:
            return Holder(value, held)
        return DEVICE if isinstance(value, torch.device) else value

    def _begun(self) -> Before | None:
        """What was there before the step, which begins with the first call that is recorded."""
        if self.follows and self._before is None:
            self._before = Before()
        return self._before

    def _note_state(self, module: nn.Module) -> None:
        """Keep buffers as they are before a forward writes them."""
        for each in module.modules():
            self._modes.setdefault(each, each.training)
        _copy_buffers(module, self.buffers)


def _copy_buffers(module: nn.Module, copies: dict[Tensor, Tensor]) -> None:
    for buffer in module.buffers():
        if buffer not in copies:
            copies[buffer] = buffer.detach().clone()


def _backward_of_nothing(place: Place, before: list[Recording], *, is_again: bool) -> CaptureError:
    if before and (is_again or before[-1].place != place):
        return CaptureError(
            f"{at(place)}: backward() is called a second time for one batch",
            hint="add the losses up, and call backward() on the sum",
        )
    return CaptureError(
        f"{at(place)}: backward() is called on something that no module with parameters, and no "
        "function of torch, has computed from a batch of a DataLoader",
        hint="compute the loss from the outputs of the model with functions of torch",
    )


def _with_batch(entry: Entry, number: int) -> Entry:
    """The entry with another number of the batch, as ``BATCH``."""

    def change(item: Any) -> Any:
        is_batch = isinstance(item, Ref) and item.entry == number
        return Ref(BATCH, item.path) if is_batch else item

    entry.args, entry.kwargs = rebuilt(entry.args, change), rebuilt(entry.kwargs, change)
    entry.__dict__.pop("refs", None)
    return entry


def memory_of(value: Any) -> int:
    """The address of a tensor's memory; 0 without one."""
    is_strided = isinstance(value, Tensor) and value.layout is torch.strided
    return value.untyped_storage().data_ptr() if is_strided else 0


def _has_grad(module: nn.Module) -> bool:
    return torch.is_grad_enabled() and any(p.requires_grad for p in module.parameters())


def _name_of(func: Any) -> str:
    name: str = getattr(func, "__name__", "")
    return getattr(func.__self__, "__name__", "") if name == "__get__" else name


def _writes(name: str) -> bool:
    """Whether a function of this name writes its first argument."""
    if name in ("__setitem__", "__set__"):
        return True
    if name.startswith("__i") and name.endswith("__") and name not in ("__index__", "__int__"):
        return name not in ("__invert__", "__iter__")
    return name.endswith("_") and not name.endswith("__")


def plain_device(value: Any) -> Any:
    """The CPU in the place of an accelerator."""
    if isinstance(value, torch.device):
        return torch.device("cpu") if value.type in _ELSEWHERE else value
    if isinstance(value, str) and value.partition(":")[0] in _ELSEWHERE:
        return "cpu"
    return value


def _here(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Keyword arguments that name no accelerator."""
    if kwargs.get("device") is not None:
        kwargs["device"] = torch.device(plain_device(kwargs["device"]))
    kwargs.pop("non_blocking", None)
    return kwargs
