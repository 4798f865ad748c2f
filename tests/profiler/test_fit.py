"""The fit finds what made the samples."""

from __future__ import annotations

import random
from dataclasses import astuple, replace

import numpy as np
import pytest

from pipectl.planner.costs.footprint import Footprints
from pipectl.planner.costs.stage_costs import operator_times, overhead_times, stage_times
from pipectl.profile import Operator, Profile, SplitBackward, StageOverhead
from pipectl.profiler.fit import DISTURBED, Sample, StageTimes, fit_stages

STAGE = StageOverhead(1e-5, 2e-6, 3e-6, 2e-5, 4e-6, 5e-6)


def profile(cached: bool) -> Profile:
    draw = random.Random(5)
    operators = [
        Operator(
            id=f"n{i}",
            name=f"layer{i}",
            forward_s=draw.uniform(1e-5, 1e-4),
            backward_s=draw.uniform(1e-5, 2e-4),
            parameter_bytes=1 << 20,
            output_bytes=100,
            gradient_bytes=100,
            parameters=((f"w{i}", 1 << 20),),
        )
        for i in range(40)
    ]
    if cached:
        operators = [replace(o, cached={8: (o.forward_s / 2, o.backward_s / 3)}) for o in operators]
    edges = [(f"n{i}", f"n{j}") for i in range(40) for j in (i + 1, i + 3) if j < 40]
    return Profile("fitted", "test", 8, tuple(operators), tuple(edges))


def samples(of: Profile, stage: StageOverhead, factors: tuple[float, float]) -> list[Sample]:
    """Stages that take exactly what the planner would say."""
    draw = random.Random(7)
    times = operator_times(of, 8)
    bare = StageOverhead(cache_bytes=stage.cache_bytes)
    footprints = Footprints(of)
    found = []
    for _ in range(8):
        borders = sorted(draw.sample(range(1, 40), draw.randint(1, 5)))
        cut = [list(range(a, b)) for a, b in zip([0, *borders], [*borders, 40], strict=True)]
        parts = footprints.of(cut)
        own = stage_times(parts.sums, times, 1.0, bare)[:, 0]
        more = np.array(overhead_times(parts.sums.values[:, 0], stage))
        times_s = (np.array(factors)[:, None] * own + more).T.tolist()
        found.append(Sample(parts, [StageTimes(*each) for each in times_s]))
    return found


def test_overhead_and_factors_are_found() -> None:
    of = profile(cached=False)
    fit = fit_stages(samples(of, STAGE, (1.1, 0.9)), of, None)
    assert fit.factors == pytest.approx((1.1, 0.9), rel=1e-3)
    assert fit.stage.forward_s == pytest.approx(STAGE.forward_s, rel=1e-2)
    assert fit.stage.received_s == pytest.approx(STAGE.received_s, rel=1e-2)
    assert fit.stage.gradient_sent_s == pytest.approx(STAGE.gradient_sent_s, rel=1e-2)
    assert fit.error < 1e-3
    assert fit.stage.cache_bytes is None


def test_the_cache_is_found() -> None:
    of = profile(cached=True)
    made = replace(STAGE, cache_bytes=24 << 20)
    fit = fit_stages(samples(of, made, (1.0, 1.0)), of, 32 << 20)
    assert fit.stage.cache_bytes == 24 << 20
    assert fit.error < 1e-3


def test_noise_is_not_taken_for_the_cache() -> None:
    of, draw = profile(cached=True), random.Random(3)
    made = replace(STAGE, cache_bytes=24 << 20)
    noisy = [
        replace(s, times=[StageTimes(f * draw.choice((1, 3)), b * 2) for f, b, _ in s.times])
        for s in samples(of, made, (1.0, 1.0))
    ]
    fit = fit_stages(noisy, of, 32 << 20)
    assert fit.error > DISTURBED
    assert fit.stage.cache_bytes is None


def test_one_disturbed_sample_changes_little() -> None:
    of = profile(cached=False)
    found = samples(of, STAGE, (1.0, 1.0))
    first, *others = found[3].times
    disturbed = first._replace(forward_s=10 * first.forward_s)
    found[3] = replace(found[3], times=[disturbed, *others])
    fit = fit_stages(found, of, None)
    assert fit.factors[0] == pytest.approx(1.0, rel=0.01)


def test_no_coefficient_is_negative() -> None:
    of = profile(cached=False)
    found = [
        replace(s, times=[StageTimes(f / 2, b) for f, b, _ in s.times])
        for s in samples(of, STAGE, (1.0, 1.0))[::2]
    ]
    found += samples(of, StageOverhead(), (1.0, 1.0))[1::2]
    stage = fit_stages(found, of, None).stage
    assert min(stage.forward_s, stage.received_s, stage.sent_s, stage.backward_s) >= 0


def test_operators_keep_some_time_however_odd_the_samples() -> None:
    of = profile(cached=False)
    found = [
        replace(s, times=[StageTimes(1e-3, 2e-3)] * len(s.times))
        for s in samples(of, STAGE, (1.0, 1.0))
    ]
    fit = fit_stages(found, of, None)
    assert fit.factors == pytest.approx((0.5, 0.5))
    assert fit.stage.forward_s > 0


@pytest.mark.parametrize("operators_s", [0.0, 2e-5])
def test_split_backwards_are_found(operators_s: float) -> None:
    """Half of the operators have parameters; their halves take 5 % and 10 us more than a whole."""
    of = profile(cached=False)
    bare = [replace(o, parameters=()) if i % 2 else o for i, o in enumerate(of.operators)]
    of = replace(of, operators=tuple(bare))
    made = SplitBackward(operators_s, 0.45, operators_s / 4, 0.6, operators_s / 2)
    measured = []
    for sample in samples(of, StageOverhead(), (1.0, 1.0)):
        split = []
        for members, (forward_s, backward_s, _) in zip(
            sample.parts.members, sample.times, strict=True
        ):
            weighing = [of.operators[index] for index in members if of.operators[index].parameters]
            own_s, count = sum(operator.backward_s for operator in weighing), len(weighing)
            split.append(
                StageTimes(
                    forward_s + made.forward_s * count,
                    backward_s - own_s * (1 - made.input_share) + made.input_s * count,
                    own_s * made.weight_share + made.weight_s * count,
                )
            )
        measured.append(replace(sample, split=split))
    found = fit_stages(measured, of, None).split
    assert astuple(found) == pytest.approx(astuple(made), rel=1e-3, abs=1e-9)


def test_halves_are_never_shorter_than_the_whole() -> None:
    of = profile(cached=False)
    measured = [
        replace(s, split=[StageTimes(f, b / 4, b / 2) for f, b, _ in s.times])
        for s in samples(of, StageOverhead(), (1.0, 1.0))
    ]
    found = fit_stages(measured, of, None).split
    assert found.input_share + found.weight_share == pytest.approx(1.0)
