"""The fit finds what made the samples."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import astuple, replace
from typing import Any

import numpy as np
import pytest

from pipectl.planner.costs.footprint import Footprints
from pipectl.planner.costs.stage_costs import operator_times, overhead_times, stage_times
from pipectl.profile import Profile
from pipectl.profile_parts import Operator, SplitBackward, StageOverhead
from pipectl.profiler.fit import DISTURBED, Sample, StageTimes, fit_stages

STAGE = StageOverhead(1e-5, 2e-6, 3e-6, 2e-5, 4e-6, 5e-6)


def profile(cached: bool) -> Profile:
    draw = random.Random(5)
    operators = [
        Operator(
            id=f"n{i}",
            name=f"layer{i}",
            forward_s=draw.uniform(1e-5, 1e-4),
            backward_s=draw.uniform(1e-5, 2e-4) if i >= 9 else 0.0,  # integers, say
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
        times_s = ((np.array(factors)[:, None] * own + more) * (own > 0)).T.tolist()
        found.append(Sample(parts, [StageTimes(*each) for each in times_s]))
    return found


@pytest.mark.parametrize("cache_bytes", [None, 24 << 20])
def test_overhead_factors_and_the_cache_are_found(cache_bytes: int | None) -> None:
    of = profile(cached=cache_bytes is not None)
    made = replace(STAGE, cache_bytes=cache_bytes)
    fit = fit_stages(samples(of, made, (1.1, 0.9)), of, cache_bytes and 32 << 20)
    assert fit.factors == pytest.approx((1.1, 0.9), rel=1e-3)
    assert astuple(fit.stage)[:6] == pytest.approx(astuple(made)[:6], rel=1e-2)
    assert fit.stage.cache_bytes == cache_bytes
    assert fit.error < 1e-3


def changed(of: Profile, change: Callable[[StageTimes], StageTimes], **made: Any) -> list[Sample]:
    found = samples(of, replace(STAGE, **made), (1.0, 1.0))
    return [replace(sample, times=list(map(change, sample.times))) for sample in found]


def test_noise_is_not_taken_for_the_cache() -> None:
    of, draw = profile(cached=True), random.Random(3)
    noisy = changed(
        of,
        lambda t: StageTimes(t.forward_s * draw.choice((1, 3)), t.backward_s * 2),
        cache_bytes=24 << 20,
    )
    fit = fit_stages(noisy, of, 32 << 20)
    assert fit.error > DISTURBED
    assert fit.stage.cache_bytes is None


def test_odd_samples_change_little_and_make_no_time_negative() -> None:
    of = profile(cached=False)
    found = samples(of, STAGE, (1.0, 1.0))
    first, *others = found[3].times
    disturbed = first._replace(forward_s=10 * first.forward_s)
    found[3] = replace(found[3], times=[disturbed, *others])
    assert fit_stages(found, of, None).factors[0] == pytest.approx(1.0, rel=0.01)
    halved = changed(of, lambda t: t._replace(forward_s=t.forward_s / 2))
    found = halved[::2] + samples(of, StageOverhead(), (1.0, 1.0))[1::2]
    stage = fit_stages(found, of, None).stage
    assert min(stage.forward_s, stage.received_s, stage.sent_s, stage.backward_s) >= 0
    fit = fit_stages(changed(of, lambda _: StageTimes(1e-3, 2e-3)), of, None)
    assert fit.factors == pytest.approx((0.5, 0.5))  # operators keep some time
    assert fit.error == pytest.approx(0.125, abs=1e-3)
    assert fit.stage.forward_s > 0


@pytest.mark.parametrize(
    ("made", "found"),
    [
        (SplitBackward(0.0, 0.45, 0.0, 0.6, 0.0), SplitBackward(0.0, 0.45, 0.0, 0.6, 0.0)),
        (SplitBackward(2e-5, 0.45, 5e-6, 0.6, 1e-5), SplitBackward(2e-5, 0.45, 5e-6, 0.6, 1e-5)),
        # Two halves are never shorter than the whole.
        (SplitBackward(0.0, 0.2, 0.0, 0.6, 0.0), SplitBackward(0.0, 0.25, 0.0, 0.75, 0.0)),
    ],
    ids=["shares", "shares and a time for each operator", "too short"],
)
def test_split_backwards_are_found(made: SplitBackward, found: SplitBackward) -> None:
    """Half of the operators have parameters, so that their backward is split."""
    of = profile(cached=False)
    bare = [replace(o, parameters=()) if i % 2 else o for i, o in enumerate(of.operators)]
    of = replace(of, operators=tuple(bare))
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
    fitted = fit_stages(measured, of, None).split
    assert astuple(fitted) == pytest.approx(astuple(found), rel=1e-3, abs=1e-9)
