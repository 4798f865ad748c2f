"""Whatever a file or an override holds: a spec, or an error for people, and never a traceback."""

import json
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from pipectl.errors import SpecError, UsageError
from pipectl.spec import dump, load
from pipectl.spec.schema import json_schema, properties

pytestmark = pytest.mark.slow

SETTINGS = settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
YAML_LIKE = st.text(st.sampled_from(list("abn01:-[]{}'\"&*!#|>%@,.?~ \n\t\\x")), max_size=40)
PATHS = [
    path
    for name, schema in properties(json_schema()).items()
    for path in [(name,), *((name, key) for key in properties(schema))]
]
SCALARS = st.one_of(
    *(st.none(), st.booleans(), st.integers(-3, 10), st.integers(), st.floats()),
    st.text(max_size=12),
    st.sampled_from(
        ["auto", "none", "a.b:c", "./x.py:f", "4GiB", "1:00:00", "slurm", "1f1b", "-x", "samples"]
    ),
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["factory", "kwargs", "a", "B"]) | st.text(max_size=3), inner
        )
    ),
    max_leaves=6,
)


@pytest.fixture
def attempt(tmp_path):
    """Load bytes; what is no spec must be refused with a printable message."""
    path = tmp_path / "job.yaml"

    def load_bytes(content, *overrides):
        path.write_bytes(content)
        try:
            return load(path, overrides, sites=(), check_files=False)
        except (SpecError, UsageError) as error:
            message = error.message.replace("\n", "")
            assert message
            assert message.isprintable()
            return None

    return load_bytes


@SETTINGS
@given(YAML_LIKE, st.text(max_size=20))
@example("? ", "[key]")
@example("%YAML 1.1\n--- !!a", "")
@example("&a *a", "")
@example('"\\U99999999"', "")
def test_anything_like_yaml_in_a_file_or_an_override(attempt, minimal, text, key):
    attempt(text.encode())
    attempt(f"{minimal}output: {text}\n".encode())
    attempt(minimal.encode(), f"{key}={text}")
    attempt(minimal.encode(), key)


@SETTINGS
@given(st.lists(st.tuples(st.sampled_from(PATHS), VALUES), min_size=1, max_size=3))
def test_any_value_of_any_key(attempt, by_schema, minimal, tmp_path, changes):
    """What is accepted is written, read back the same, and accepted by the JSON Schema."""
    overrides = [f"{'.'.join(path)}={as_yaml(value)}" for path, value in changes]
    spec = attempt(minimal.encode(), *overrides)
    if spec is not None:
        (tmp_path / "run.yaml").write_text(dump(spec), encoding="utf-8")
        again = load(tmp_path / "run.yaml", sites=(), check_files=False)
        assert dump(again) == dump(spec)
        for name in ("training", "resources", "trace", "slurm", "pbs", "sweep"):
            assert repr(getattr(again, name)) == repr(getattr(spec, name))
        assert by_schema(dump(spec))


def as_yaml(value: Any) -> str:
    """JSON is YAML, but for numbers that are none and the characters YAML calls unprintable."""
    return json.dumps(value).replace("NaN", ".nan").replace("Infinity", ".inf")
