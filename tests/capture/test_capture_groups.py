"""Parameter groups by name pattern."""

from __future__ import annotations

import pytest

from pipectl.capture.job import assign_groups as assign
from pipectl.errors import CaptureError

NAMES = {
    name: [name] for name in ("embed.weight", "block.0.bias", "block.0.weight", "norm.bias", "head")
}


def test_the_first_pattern_that_matches_wins_and_the_rest_has_none() -> None:
    found = assign(NAMES, ["*.bias", "block.*", "norm.*"])
    assert found == {"block.0.bias": 0, "norm.bias": 0, "block.0.weight": 1}


def test_a_star_matches_dots_and_case_counts() -> None:
    assert set(assign(NAMES, ["b*s"])) == {"block.0.bias"}
    with pytest.raises(CaptureError):
        assign(NAMES, ["*.BIAS"])


def test_any_name_of_a_tied_parameter_counts() -> None:
    assert assign({"a": ["embed.weight", "head.weight"]}, ["head.*"]) == {"a": 0}


@pytest.mark.parametrize(
    ("pattern", "hint"),
    [
        ("bias", "did you mean '*.bias'?"),
        ("block", "did you mean 'block.*'?"),
        ("embed.wieght", "did you mean 'embed.weight'?"),
        ("conv*", "matches no parameter"),
    ],
)
def test_a_pattern_without_a_match_is_refused_with_help(pattern: str, hint: str) -> None:
    with pytest.raises(CaptureError, match=r"optimizer\.groups\[1\]\.match") as caught:
        assign(NAMES, ["*", pattern])
    assert hint in caught.value.message
    assert "embed.weight" in str(caught.value.cure)
