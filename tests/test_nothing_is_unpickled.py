"""Files of a run directory are bytes and JSON: nothing in them can run code."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import pipectl

SOURCES = sorted(Path(pipectl.__file__).parent.rglob("*.py"))
MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "joblib"}
CALLS = {
    "torch.load", "np.load", "numpy.load", "np.fromfile", "yaml.load", "yaml.load_all",
    "yaml.unsafe_load", "yaml.unsafe_load_all", "yaml.full_load", "eval", "exec", "os.system",
    "os.popen", "torch.package", "torch.jit.load", "torch.export.load", "builtins.eval",
}  # fmt: skip
BASES = {"yaml.Loader", "yaml.FullLoader", "yaml.UnsafeLoader", "yaml.CLoader", "yaml.BaseLoader"}


def suspicious(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (a.name for a in node.names if a.name.split(".")[0] in MODULES)
        elif isinstance(node, ast.ImportFrom):
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            yield from names & (CALLS | BASES)
            if (node.module or "").split(".")[0] in MODULES:
                yield str(node.module)
        elif isinstance(node, ast.Call | ast.ClassDef):
            given = [node.func] if isinstance(node, ast.Call) else node.bases
            yield from {ast.unparse(name) for name in given} & (CALLS | BASES)
            yield from (
                f"{word.arg}=True"
                for word in node.keywords
                if word.arg in ("allow_pickle", "shell") and ast.unparse(word.value) != "False"
            )


def test_no_source_unpickles_or_evaluates() -> None:
    found = {str(p): list(suspicious(ast.parse(p.read_text(encoding="utf-8")))) for p in SOURCES}
    assert found
    assert {path: names for path, names in found.items() if names} == {}


@pytest.mark.parametrize(
    "text",
    ["import pickle", "from dill import load", "torch.load(x)", "np.load(f, allow_pickle=True)",
     "yaml.load(t, Loader=yaml.Loader)", "class A(yaml.UnsafeLoader): ...", "eval('1')",
     "from torch import load", "from yaml import unsafe_load as f", "run(x, shell=True)"],
)  # fmt: skip
def test_the_test_would_notice(text: str) -> None:
    assert list(suspicious(ast.parse(text)))
