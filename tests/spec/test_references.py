"""Which of the user's files stand behind a factory."""

from pathlib import Path

import pytest

from pipectl.spec import profile_key, references
from pipectl.spec.references import parse, user_sources


@pytest.fixture
def write(tmp_path):
    def files(texts):
        for name, text in texts.items():
            path = tmp_path / f"{name}.py"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)

    return files


def files_of(base: Path, *references: str) -> dict[str, str]:
    parsed = [parse(reference, base) for reference in references]
    return {name: path.relative_to(base).as_posix() for name, path in user_sources(parsed).items()}


@pytest.mark.parametrize(
    ("files", "names"),
    [
        (
            {
                "model": "import layers\nimport os, torch, no_such\n",
                "layers": "from blocks import Block\n",
                "blocks": "def f():\n    import inner.deep as d\n",
                "inner/deep": "",
                "unused": "",
            },
            ["blocks", "inner.deep", "layers"],
        ),
        (  # packages and relative imports
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
            [
                *("nets", "nets.big", "nets.common", "nets.extra"),
                *("nets.parts", "nets.parts.attention"),
            ],
        ),
        (  # packages that are directories alone
            {
                "model": "from src.models.gpt import Gpt",
                "src/models/gpt": "from . import blocks",
                "src/models/blocks": "",
                "src/models/unused": "",
            },
            ["src.models.blocks", "src.models.gpt"],
        ),
        ({"model": "import a", "a": "import b, model", "b": "import a"}, ["a", "b", "model"]),
        ({"model": "import broken", "broken": "import other\nthis is no python"}, ["broken"]),
    ],
)
def test_what_a_file_imports(tmp_path, write, files, names):
    write(files)
    assert files_of(tmp_path, "./model.py:build") == {
        name: path
        for name in names
        for path in (f"{name.replace('.', '/')}.py", f"{name.replace('.', '/')}/__init__.py")
        if (tmp_path / path).exists()
    }


def test_directories_of_one_name_make_up_a_package_unless_one_has_its_own_file(
    tmp_path, write, monkeypatch
):
    monkeypatch.setattr(references, "_SEARCH", (f"{tmp_path}/site-packages", f"{tmp_path}/work"))
    write({"model": "import shared.mine, shared.theirs, whole.part, whole.inner.part"})
    write({"site-packages/shared/theirs": "", "work/shared/mine": "", "whole/part": ""})
    write({"work/whole/__init__": "", "work/whole/inner/part": ""})
    assert files_of(tmp_path, "./model.py:build") == {
        "shared.mine": "work/shared/mine.py",
        "whole": "work/whole/__init__.py",
        "whole.inner.part": "work/whole/inner/part.py",
    }


def test_modules_along_the_search_path(tmp_path, write, monkeypatch):
    write({"work/mine/__init__": "", "work/mine/data": "", "lib/site-packages/theirs": ""})
    write({"work/mine/model": "from mine import data"})
    monkeypatch.setattr(
        references, "_SEARCH", (f"{tmp_path}/work", f"{tmp_path}/lib/site-packages")
    )
    assert sorted(files_of(tmp_path, "mine.model:build", "theirs:f", "torch.nn:MSELoss")) == [
        *("mine", "mine.data", "mine.model")
    ]


def test_libraries_hide_what_stands_behind_them(tmp_path, write, monkeypatch):
    write({"model": "import same, json", "work/same": "", "json": ""})
    write({"site-packages/same": "", "site-packages/json": ""})
    monkeypatch.setattr(references, "_SEARCH", (f"{tmp_path}/site-packages", f"{tmp_path}/work"))
    assert files_of(tmp_path, "./model.py:build") == {}


def test_a_key_changes_with_what_the_files_import(read, minimal, tmp_path):
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    (folder / "net.py").write_text("import layers\n")
    (folder / "layers.py").write_text("width = 1\n")
    spec = read(minimal, f"model.factory={folder}/net.py:build")
    before = profile_key(spec)
    assert profile_key(spec) == before
    (folder / "layers.py").write_text("width = 2\n")
    assert profile_key(spec) != before
