"""The points of a sweep: which they are, and what is wrong with them, at its place."""

from pathlib import Path

import pytest

from pipectl.spec import SpecFile, dump, load


@pytest.fixture
def points(minimal, read_points):
    """The points of the minimal job with a text from line 7 on."""
    return lambda text, *overrides: read_points(minimal + text, *overrides)


def test_a_grid_and_points(points):
    runs = points(
        """\
sweep:
  grid: {optimizer.kwargs.lr: [1e-3, 3e-4], training.seed: [0, 1]}
  points: [{training.batch_size: 16}]
"""
    )
    assert [dict(point.values) for point in runs] == [
        {"optimizer.kwargs.lr": 1e-3, "training.seed": 0},
        {"optimizer.kwargs.lr": 1e-3, "training.seed": 1},
        {"optimizer.kwargs.lr": 3e-4, "training.seed": 0},
        {"optimizer.kwargs.lr": 3e-4, "training.seed": 1},
        {"training.batch_size": 16},
    ]
    assert runs[1].spec.optimizer.kwargs == {"lr": 1e-3}
    assert runs[1].spec.training.seed == 1
    assert runs[4].spec.training.batch_size == 16
    assert all(point.spec.sweep is None for point in runs)


def test_the_job_itself_has_no_value_of_its_sweep(minimal, points):
    (first, _) = points("sweep: {grid: {training.seed: [3, 4]}}\n")
    spec = load(Path("job.yaml"), sites=())
    assert (spec.training.seed, first.spec.training.seed) == (0, 3)
    assert spec.sweep is not None
    Path("again.yaml").write_text(dump(spec))
    assert load(Path("again.yaml")).sweep == spec.sweep


def test_values_have_the_types_of_their_fields(points):
    runs = points(
        """\
sweep:
  points:
    - {training.clip_grad_norm: null, pipeline.memory_limit: 1GiB}
    - {optimizer: {factory: torch.optim:SGD, kwargs: {lr: 0.1}}}
    - {model.kwargs.in_features: "4"}
"""
    )
    assert runs[0].spec.pipeline.memory_limit == 2**30
    assert runs[1].spec.optimizer.factory == "torch.optim:SGD"
    assert runs[2].spec.model.kwargs["in_features"] == "4"


@pytest.mark.parametrize(
    "points_of_sweep",
    [
        "grid: {environment.variables.KEY: [s3cret, s4cret], training.seed: [0, 1]}",
        "points: [{environment.variables.KEY: s3cret}, {environment.variables: {KEY: s4cret}}]",
        "grid: {environment.variables: [{KEY: s3cret}, {KEY: s4cret}]}",
        "points: [{environment: {variables: {KEY: s3cret}}}]",
    ],
)
def test_values_of_environment_variables_are_in_no_value_of_a_point(points, points_of_sweep):
    runs = points(f"sweep: {{{points_of_sweep}}}\n")
    first = runs[0].values
    assert first.get("environment.variables.KEY", "(value 1)") == "(value 1)"
    assert "cret" in runs[0].spec.environment.variables["KEY"]
    assert "cret" not in str([point.values for point in runs])
    assert all("environment" in str(point.values) for point in runs)
    file = SpecFile.read(Path("job.yaml"), sites=())
    assert "cret" not in str(file.origins(file.spec()))


def test_keys_of_a_sweep_join_a_factory_in_short_form(points):
    runs = points(
        """\
optimizer: torch.optim:SGD
sweep: {points: [{optimizer.groups: [{match: "*.bias", lr: 0.1}]}, {optimizer.kwargs.lr: 0.2}]}
"""
    )
    assert [point.spec.optimizer.factory for point in runs] == ["torch.optim:SGD"] * 2
    assert runs[0].spec.optimizer.groups[0].match == "*.bias"
    assert runs[1].spec.optimizer.kwargs == {"lr": 0.2}


def test_a_sweep_goes_over_set_and_can_be_left_out(points):
    sweep = "sweep: {grid: {training.seed: [3, 4]}}\n"
    assert [p.spec.training.seed for p in points(sweep, "training.seed=9")] == [3, 4]
    assert points(sweep, "sweep=null") == ()
    assert len(points("", "sweep.points=[{training.seed: 1}, {training.seed: 2}]")) == 2
