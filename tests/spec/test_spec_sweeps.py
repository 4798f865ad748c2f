"""The points of a sweep: which they are, and what they hold."""

from pathlib import Path

import pytest

from pipectl.spec import SpecFile, dump, load


@pytest.fixture
def points(spec_file, minimal):
    """The points of the minimal job with a text from line 7 on."""

    def read(text, *overrides):
        file = spec_file(minimal + text, *overrides)
        return file.points(file.spec())

    return read


def test_a_grid_and_points(points):
    runs = points(
        """\
sweep:
  grid: {optimizer.kwargs.lr: [1e-3, 3e-4], training.seed: [3, 4]}
  points: [{training.batch_size: 16}]
"""
    )
    assert [dict(point.values) for point in runs] == [
        {"optimizer.kwargs.lr": 1e-3, "training.seed": 3},
        {"optimizer.kwargs.lr": 1e-3, "training.seed": 4},
        {"optimizer.kwargs.lr": 3e-4, "training.seed": 3},
        {"optimizer.kwargs.lr": 3e-4, "training.seed": 4},
        {"training.batch_size": 16},
    ]
    assert runs[1].spec.optimizer.kwargs == {"lr": 1e-3}
    assert runs[1].spec.training.seed == 4
    assert runs[4].spec.training.batch_size == 16
    assert all(point.spec.sweep is None for point in runs)
    job = load(Path("job.yaml"), sites=())
    assert job.training.seed == 0, "the job itself has no value of its sweep"
    Path("again.yaml").write_text(dump(job))
    assert load(Path("again.yaml")).sweep == job.sweep


def test_values_have_the_types_of_their_fields_and_join_a_factory_in_short_form(points):
    runs = points(
        """\
optimizer: torch.optim:SGD
sweep:
  points:
    - {training.clip_grad_norm: null, pipeline.memory_limit: 1GiB}
    - {optimizer: {factory: torch.optim:Adam, kwargs: {lr: 0.1}}}
    - {model.kwargs.in_features: "4", optimizer.kwargs.lr: 0.2}
    - {optimizer.groups: [{match: "*.bias", lr: 0.1}]}
"""
    )
    specs = [point.spec for point in runs]
    assert specs[0].pipeline.memory_limit == 2**30
    factories = [spec.optimizer.factory.rpartition(":")[2] for spec in specs]
    assert factories == ["SGD", "Adam", "SGD", "SGD"]
    assert specs[2].model.kwargs["in_features"] == "4"
    assert specs[2].optimizer.kwargs == {"lr": 0.2}
    assert specs[3].optimizer.groups[0].match == "*.bias"


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


def test_a_sweep_goes_over_set_and_can_be_left_out(points):
    sweep = "sweep: {grid: {training.seed: [3, 4]}}\n"
    assert [p.spec.training.seed for p in points(sweep, "training.seed=9")] == [3, 4]
    assert points(sweep, "sweep=null") == ()
    assert len(points("", "sweep.points=[{training.seed: 1}, {training.seed: 2}]")) == 2
