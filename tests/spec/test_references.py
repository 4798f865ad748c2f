"""Which of the user's files stand behind a factory."""

import pytest

from pipectl.spec import references
from pipectl.spec.references import parse, user_sources

FACTORIES = ("./model.py:build", "mine.model:build", "theirs:f", "torch.nn:MSELoss")


@pytest.mark.parametrize(
    ("files", "found"),
    [
        pytest.param(
            {
                "model": "import layers\nimport os, torch, no_such\n",
                "layers": "from blocks import Block\n",
                "blocks": "def f():\n    import inner.deep as d\n",
                "inner/deep": "",
                "unused": "",
            },
            "blocks inner/deep layers",
            id="modules",
        ),
        pytest.param(
            {
                "model": "from nets.big import Big\n",
                "nets/__init__": "from . import common\n",
                "nets/big": "from .parts import (\n    attention,\n)\nfrom ..nets import extra\n",
                "nets/common": "",
                "nets/extra": "",
                "nets/unused": "",
                "nets/parts/__init__": "",
                "nets/parts/attention": "from ..common import x\n",
            },
            "nets/__init__ nets/big nets/common nets/extra nets/parts/__init__ "
            "nets/parts/attention",
            id="packages and relative imports",
        ),
        pytest.param(
            {
                "model": "from src.models.gpt import Gpt",
                "src/models/gpt": "from . import blocks",
                "src/models/blocks": "",
                "src/models/unused": "",
            },
            "src/models/blocks src/models/gpt",
            id="packages that are directories alone",
        ),
        pytest.param(
            {"model": "import a", "a": "import b, model", "b": "import a"},
            "a b model",
            id="a cycle",
        ),
        pytest.param(
            {"model": "import broken", "broken": "import other\nthis is no python"},
            "broken",
            id="no Python",
        ),
        pytest.param(
            {
                "model": "import shared.mine, shared.theirs, whole.part, whole.inner.part",
                "site-packages/shared/theirs": "",
                "work/shared/mine": "",
                "whole/part": "",
                "work/whole/__init__": "",
                "work/whole/inner/part": "",
            },
            "work/shared/mine work/whole/__init__ work/whole/inner/part",
            id="directories of one name are one package unless one has its own file",
        ),
        pytest.param(
            {
                "work/mine/__init__": "",
                "work/mine/data": "",
                "work/mine/model": "from mine import data",
                "site-packages/theirs": "",
            },
            "work/mine/__init__ work/mine/data work/mine/model",
            id="modules along the search path",
        ),
        pytest.param(
            {
                "model": "import same, json",
                "work/same": "",
                "json": "",
                "site-packages/same": "",
                "site-packages/json": "",
            },
            "",
            id="libraries hide what stands behind them",
        ),
    ],
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
