"""Which of the user's files stand behind a factory."""

import pytest

from pipectl.spec import references
from pipectl.spec.references import parse, user_sources

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
