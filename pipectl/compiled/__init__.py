"""Compilation of the inner loops of the planner and the simulator with LLVM.

A kernel is a plain function of numbers and NumPy arrays. On its first call with given types,
``pipectl.compiled.statements`` translates it to LLVM IR, and LLVM compiles it in a tenth of a
second. The machine code is cached in the user's cache directory. Its file name is a hash of the
code of the kernel and of all that it calls, so it is never stale. Kernels use IEEE arithmetic in
the order written, for any processor of the architecture (no fused operations, no vectors, no
threads).
Results are the same on every machine, and the same as Python's with ``PIPECTL_INTERPRET=1``, which
is for debugging kernels.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import cache
from hashlib import sha256
from pathlib import Path
from threading import Lock
from time import perf_counter
from types import FunctionType
from typing import Any, Generic, ParamSpec, TypeVar

import numpy as np

from pipectl.compiled.types import Type, operand_types, type_of
from pipectl.errors import PipectlError
from pipectl.files import replace_file, user_cache

P = ParamSpec("P")
R = TypeVar("R")
_C_TYPES: dict[str, Any] = {
    "i64": ctypes.c_int64,
    "double": ctypes.c_double,
    "i1": ctypes.c_bool,
    "ptr": ctypes.c_void_p,
}
_RETURNED: dict[str, Any] = {"None": None, "int": ctypes.c_int64, "float": ctypes.c_double}
_DIGEST_BYTES = 32
_LOCK = Lock()
_spent_s = 0.0


def compiling_s() -> float:
    """Seconds that this process has spent on compiling kernels that were not on disk."""
    return _spent_s


class Kernel(Generic[P, R]):
    """A function that runs as machine code; it takes positional arguments."""

    def __init__(self, function: Callable[P, R]) -> None:
        self.__doc__ = function.__doc__
        self.function = function
        self._codes: dict[tuple[Type, ...], Callable[..., R]] = {}

    def __call__(self, *args: P.args, **named: P.kwargs) -> R:
        """Call the kernel.

        Raises:
            TypeError: kernels do not support the arguments or the function.
        """
        if named:
            raise TypeError("kernels take arguments by position")
        kinds = tuple(map(type_of, args))
        code = self._codes.get(kinds)
        if code is None:
            with _LOCK:
                code = self._codes[kinds] = _code_of(self.function, kinds)
        return code(*_operands(args))


def run_small(kernel: Callable[..., R], *args: Any) -> R:
    """Call a kernel, in Python if this process has not loaded LLVM.

    For loops that end before LLVM would be loaded, which takes 46 MiB, too.
    """
    if isinstance(kernel, Kernel) and not _llvm.cache_info().currsize:
        result: R = _in_python(kernel.function)(*args)
        return result
    return kernel(*args)


def _in_python(function: Any) -> Callable[..., Any]:
    """A function that calls the kernels in its global names in Python, too."""
    names = dict(function.__globals__)
    for name in function.__code__.co_names:
        if (called := _function_of(names.get(name))) is not None:
            names[name] = called if called is function else _in_python(called)
    return FunctionType(function.__code__, names)


def compiled(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate a kernel; kernels may call each other."""
    return function if os.environ.get("PIPECTL_INTERPRET") else Kernel(function)


def _operands(values: Iterable[Any]) -> list[Any]:
    """Numbers as they are, arrays as address and shape, tuples as their members."""
    operands: list[Any] = []
    for value in values:
        if isinstance(value, np.ndarray):
            operands += value.ctypes.data, *value.shape
        elif isinstance(value, tuple):
            operands += _operands(value)
        else:
            operands.append(value)
    return operands


def _function_of(called: Any) -> FunctionType | None:
    """The Python function of a kernel; None for anything else."""
    function = called.function if isinstance(called, Kernel) else None
    return function if isinstance(function, FunctionType) else None


def _code_of(function: Any, kinds: tuple[Type, ...]) -> Callable[..., Any]:
    global _spent_s
    llvm, machine, engine = _llvm()
    result = function.__annotations__.get("return")
    if result not in _RETURNED:
        raise TypeError(f"{function.__name__}: only kernels can take the result, {result}")
    hashed = sha256(f"{llvm.llvm_version_info} {machine.triple} {kinds}".encode())
    hashed.update(_translator())
    for each in _meanings(function, set()):
        hashed.update(repr(each).encode())
    symbol = f"{function.__name__}-{hashed.hexdigest()[:32]}"  # one name space for all kernels
    folder = _folder()
    data = None if folder is None else _read(folder / symbol)
    if data is None:
        begin_s = perf_counter()
        data = _compile(function, kinds, symbol)
        _spent_s += perf_counter() - begin_s
        if folder is not None:
            _write(folder / symbol, data)
    engine.add_object_file(llvm.ObjectFileRef.from_data(data))
    engine.finalize_object()
    given = [_C_TYPES[each] for kind in kinds for each in operand_types(kind)]
    return ctypes.CFUNCTYPE(_RETURNED[result], *given)(engine.get_function_address(symbol))


def _meanings(function: FunctionType, seen: set[FunctionType]) -> Iterator[object]:
    """Everything besides types that the machine code of a function depends on, with its calls."""
    seen.add(function)
    code, names = function.__code__, function.__globals__
    yield code.co_code, code.co_consts, code.co_names, code.co_varnames
    yield function.__annotations__.get("return")
    for name in code.co_names:
        value = names.get(name)
        called = _function_of(value)
        if called is not None and called not in seen:
            yield from _meanings(called, seen)
        yield getattr(value, "_fields", None)
        attributes = (getattr(value, each, None) for each in code.co_names)
        yield [each for each in (value, *attributes) if isinstance(each, float | int | np.generic)]


@cache
def _translator() -> bytes:
    """The source of everything that makes code of a kernel.

    Raises:
        PipectlError: pipectl is installed without its source files.
    """
    files = sorted(Path(__file__).parent.glob("*.py"))
    if not files:
        raise PipectlError(
            "the source files of pipectl are missing",
            hint="install pipectl with its .py files, from which it compiles its inner loops",
        )
    return b"".join(file.read_bytes() for file in files)


def _compile(function: Any, kinds: tuple[Type, ...], symbol: str) -> bytes:
    """An object file; vectors and unrolled loops would take longer to compile than they save."""
    from pipectl.compiled.statements import Module  # rarely needed

    text = Module(_function_of).translate(function, kinds, symbol)
    llvm, machine, _ = _llvm()
    module = llvm.parse_assembly(text)
    tuning = llvm.create_pipeline_tuning_options(speed_level=2)
    tuning.loop_unrolling = tuning.loop_vectorization = tuning.slp_vectorization = False
    builder = llvm.create_pass_builder(machine, tuning)
    builder.getModulePassManager().run(module, builder)
    return bytes(machine.emit_object(module))


@cache
def _llvm() -> tuple[Any, Any, Any]:
    """LLVM, the target machine (any processor of the architecture), and the loader of code. Only
    processes that call a kernel load LLVM."""
    import llvmlite.binding as llvm

    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    target = llvm.Target.from_default_triple()
    machine = target.create_target_machine(opt=2, codemodel="jitdefault", jit=True)
    return llvm, machine, llvm.create_mcjit_compiler(llvm.parse_assembly(""), machine)


@cache
def _folder() -> Path | None:
    """The directory of machine code; None if there is none, or if other users could write to it."""
    return user_cache("kernels")


def _read(path: Path) -> bytes | None:
    """The content of a file of this user that begins with its hash; None if there is none."""
    with suppress(OSError), path.open("rb") as file:
        if os.fstat(file.fileno()).st_uid != os.geteuid():  # another user moved the directory
            return None
        content = file.read()
        digest, data = content[:_DIGEST_BYTES], content[_DIGEST_BYTES:]
        return data if sha256(data).digest() == digest else None
    return None


def _write(path: Path, data: bytes) -> None:
    """Write such a file, if possible."""
    with suppress(OSError):
        replace_file(path, sha256(data).digest() + data, 0o600, durable=False)
