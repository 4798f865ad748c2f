"""Which of the user's files stand behind a factory."""

import subprocess
import sys

import pytest

from pipectl import libraries
from pipectl.faults import is_user_code
from pipectl.spec import references
from pipectl.spec.references import parse, types_taken, user_sources

FACTORIES = ("./model.py:build", "mine.model:build", "theirs:f", "torch.nn:MSELoss")
BESIDE_THE_JOB = {
    "model": "import layers, a\nimport os, torch, no_such\nfrom nets.big import Big\n"
    "from src.models.gpt import Gpt\nimport broken\n",
    "layers": "from blocks import Block\n",
    "blocks": "def f():\n    import inner.deep as d\n",
    "inner/deep": "",
    # Packages and relative imports.
    "nets/__init__": "from . import common\n",
    "nets/big": "from .parts import (\n    attention,\n)\nfrom ..nets import extra\n",
    "nets/common": "",
    "nets/extra": "",
    "nets/parts/__init__": "",
    "nets/parts/attention": "from ..common import x\n",
    # Packages that are directories alone.
    "src/models/gpt": "from . import blocks",
    "src/models/blocks": "",
    # A cycle.
    "a": "import b, model",
    "b": "import a",
    # What is no Python imports nothing.
    "broken": "import unused\nthis is no python",
    "unused": "",
    "nets/unused": "",
    "src/models/unused": "",
}
ON_THE_SEARCH_PATH = {
    "model": "import shared.mine, shared.theirs, whole.part, whole.inner.part\nimport same, json",
    "work/mine/__init__": "",
    "work/mine/data": "",
    "work/mine/model": "from mine import data",
    "site-packages/theirs": "",
    # Directories of one name are one package unless one has its own file.
    "site-packages/shared/theirs": "",
    "work/shared/mine": "",
    "whole/part": "",
    "work/whole/__init__": "",
    "work/whole/inner/part": "",
    # Libraries hide what stands behind them.
    "work/same": "",
    "json": "",
    "site-packages/same": "",
    "site-packages/json": "",
}


@pytest.mark.parametrize(
    ("files", "found"),
    [
        (
            BESIDE_THE_JOB,
            "model layers blocks inner/deep nets/__init__ nets/big nets/common nets/extra "
            "nets/parts/__init__ nets/parts/attention src/models/gpt src/models/blocks a b broken",
        ),
        (
            ON_THE_SEARCH_PATH,
            "work/mine/__init__ work/mine/data work/mine/model work/shared/mine "
            "work/whole/__init__ work/whole/inner/part",
        ),
    ],
    ids=["beside the job", "on the search path"],
)
def test_which_files_stand_behind_a_factory(tmp_path, monkeypatch, files, found):
    for name, text in files.items():
        path = tmp_path / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    search = tuple(str(tmp_path / name) for name in ("site-packages", "work"))
    monkeypatch.setattr(references, "_SEARCH", search)
    names = {path.removeprefix("work/").removesuffix("/__init__"): path for path in found.split()}
    assert user_sources([parse(factory, tmp_path) for factory in FACTORIES]) == {
        name.replace("/", "."): tmp_path / f"{path}.py" for name, path in names.items()
    }


OUTSIDE_OF_SITE_PACKAGES = {
    "job/model.py": "import mine, listed.inner, alone, vast, apart.inner, edited, large.part",
    "job/large/__init__.py": "",
    "job/large/part.py": "",
    "job/large/more.py": "",
    # As pip install --target leaves it, with a file of the user's.
    "target/listed/__init__.py": "import mine",
    "target/listed/inner.py": "",
    "target/alone.py": "",
    "target/mine.py": "",
    "target/listed-1.0.dist-info/RECORD": "listed/__init__.py,,\n../../bin/mine.py,,\nalone.py,,\n",
    # Checkouts, one of which is installed to be edited.
    "checkout/vast/__init__.py": "",
    "checkout/vast/more.py": "",
    "checkout/vast/inner/__init__.py": "",
    "checkout/apart/inner.py": "",
    "checkout/apart/data/a.py": "",
    "checkout/apart/data/b.py": "",
    "checkout/edited/__init__.py": "",
    "checkout/edited.egg-info/SOURCES.txt": "edited/__init__.py",
    "checkout/edited.egg-info/top_level.txt": "edited",
}


def test_a_library_may_lie_outside_of_site_packages(tmp_path, monkeypatch):
    for name, text in OUTSIDE_OF_SITE_PACKAGES.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    search = [str(tmp_path / name) for name in ("target", "checkout")]
    monkeypatch.setattr(libraries, "_MAX_FILES", 2)
    monkeypatch.setattr(references, "_SEARCH", tuple(search))
    monkeypatch.setattr(sys, "path", [str(tmp_path), *search])
    found = user_sources([parse("./model.py:build", tmp_path / "job")]).values()
    users = {"target/mine.py", "checkout/apart/inner.py", "checkout/edited/__init__.py"}
    large = {"job/large/__init__.py", "job/large/part.py"}  # but beside the job
    assert {str(path.relative_to(tmp_path)) for path in found} == users | large
    for name in OUTSIDE_OF_SITE_PACKAGES:
        is_users = name in users or name.startswith(("job/", "checkout/apart", "checkout/edited"))
        assert is_user_code(str(tmp_path / name)) == is_users or name.endswith("RECORD"), name


def test_torch_is_no_users_code_wherever_it_is(tmp_path):
    """A process of its own, because torch is not found twice."""
    for name in ("torch", "torch/nn", "own"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").touch()
    code = "import sys; from pipectl.faults import is_user_code as f; print(*map(f, sys.argv[1:]))"
    files = [tmp_path / "torch/nn/__init__.py", tmp_path / "own/__init__.py"]
    words = [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(tmp_path)!r}); {code}"]
    done = subprocess.run([*words, *files], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "True"]


TAKES = """
from typing import Optional
def build(
    first, width=8, rate: "float | None" = None, steps: int = None, bias=True, mode="1",
    size: "int | str" = 0,
    betas=(0.9, 0.99), which: Optional[int] = None, kinds=("a", 1), any: Any = 0,
    default=torch.float32, flag: bool = False, *, momentum: float, seed=-1, **others
): ...
class Model:
    def __init__(self, first: int, depth: int): ...
"""


@pytest.mark.parametrize(
    ("name", "numbers", "flags"),
    [
        (
            "build",
            {"width", "rate", "steps", "betas", "which", "momentum", "seed"},
            {"bias", "flag"},
        ),
        ("Model", {"depth"}, set()),
        ("other", set(), set()),
    ],
)
def test_which_arguments_take_only_numbers(tmp_path, name, numbers, flags):
    (tmp_path / "model.py").write_text(TAKES)
    taken = types_taken(parse(f"./model.py:{name}", tmp_path), positional=1)
    assert {each for each, kind in taken.items() if kind is float} == numbers
    assert {each for each, kind in taken.items() if kind is bool} == flags
