"""Why a plan is as it is: what binds it, what came next, and what more of anything would buy.

Every answer is a plan of its own, made for the changed cluster or request and simulated, so that
"nothing" is said where nothing is gained.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from pipectl.cluster import Cluster
from pipectl.errors import InfeasibleError, OutOfTimeError
from pipectl.plan import Plan
from pipectl.planner.baselines import OWN
from pipectl.planner.explain.busiest_link import LinkLoad, busiest_link
from pipectl.planner.explain.step_parts import StepParts, step_parts
from pipectl.planner.explain.what_if import with_faster_links, with_memory, with_nodes
from pipectl.planner.request import COMPARED, Planner, PlanRequest
from pipectl.profile import Profile
from pipectl.simulate import simulate

NOTHING = 1e-3
"""A smaller share of the step is no gain: plans that differ by less count as equal."""
MOST_ALTERNATIVES = 4
GIB = 2**30
STOPPED = "not tried: planning was stopped"


@dataclass(frozen=True)
class Offer:
    """What a change would buy.

    Args:
        change: in words, e.g. ``one more node``.
        step_s: of the best plan found with it; None where it cannot be tried.
        reason: why it cannot; empty where it can.
    """

    change: str
    step_s: float | None = None
    reason: str = ""

    def gain(self, step_s: float) -> float:
        """Share of the step that is saved; 0 where nothing is."""
        if self.step_s is None or not step_s:
            return 0.0
        saved = 1 - self.step_s / step_s
        return saved if saved >= NOTHING else 0.0

    def to_json(self, step_s: float) -> dict[str, Any]:
        """The documented object; its gain is a share of ``step_s``."""
        return {
            "step_time_s": self.step_s,
            "change": self.change,
            "reason": self.reason or None,
            "gain": self.gain(step_s),
        }


@dataclass(frozen=True)
class Alternative:
    """Another plan and what sets it apart from the chosen one."""

    difference: str
    plan: Plan


@dataclass(frozen=True)
class Explanation:
    """All answers about one plan.

    Args:
        measured_size: the only micro-batch size that was measured; None if there are several.
    """

    plan: Plan
    measured_size: int | None
    parts: StepParts
    link: LinkLoad | None
    alternatives: tuple[Alternative, ...]
    offers: tuple[Offer, ...]

    @property
    def link_binds(self) -> bool:
        """Whether a link works longer in a step than the busiest rank."""
        return self.link is not None and self.link.busy_s > self.parts.busy_s

    def to_json(self) -> dict[str, Any]:
        """The documented object."""
        return {
            "binds": "link" if self.link_binds else "rank",
            "busiest_rank": asdict(self.parts),
            "busiest_link": self.link and asdict(self.link),
            "alternatives": [
                {"difference": other.difference, "step_time_s": other.plan.predicted_step_s}
                for other in self.alternatives
            ],
            "offers": [offer.to_json(self.plan.predicted_step_s) for offer in self.offers],
        }


def explain(
    plan: Plan,
    profile: Profile,
    cluster: Cluster,
    request: PlanRequest,
    planner: Planner,
    others: Iterable[Plan] = (),
    expired: Callable[[], bool] = lambda: False,
) -> Explanation:
    """Explain the best plan of a request.

    Args:
        planner: what made it; asked again for every change.
        others: further plans of the same request that the search has judged.
        expired: whether to ask no more; what is left out is then missing from the answer.
    """

    def while_time(profile: Profile, cluster: Cluster, request: PlanRequest) -> Plan:
        if expired():
            raise OutOfTimeError(STOPPED)
        return planner(profile, cluster, request)

    subject = _Subject(plan, profile, cluster, request, while_time)
    return Explanation(
        plan=plan,
        measured_size=None if profile.has_several_sizes else profile.micro_batch_size,
        parts=step_parts(plan, cluster, simulate(plan, cluster)),
        link=busiest_link(plan, cluster),
        alternatives=_alternatives(subject, others),
        offers=tuple(_offers(subject)),
    )


@dataclass(frozen=True)
class _Subject:
    """A plan and what it was made of."""

    plan: Plan
    profile: Profile
    cluster: Cluster
    request: PlanRequest
    planner: Planner

    def again(self, cluster: Cluster | None = None, **changes: Any) -> Plan:
        """The best plan with something changed."""
        request = replace(self.request, **changes)
        return self.planner(self.profile, cluster or self.cluster, request)


def _offers(subject: _Subject) -> Iterator[Offer]:
    """What changes buy; each is planned anew.

    Links twice as fast mean the same on every network; one GB/s more would be eight networks of
    1 Gbit/s, and nothing to one of 200 Gbit/s.
    """
    cluster = subject.cluster
    nodes = len(cluster.nodes)
    yield _offer("one more node", lambda: subject.again(with_nodes(cluster, nodes + 1)))
    yield _more_memory(subject)
    if cluster.ranks > 1:
        where = "between nodes" if nodes > 1 else "within the node"
        faster = with_faster_links(cluster, 2.0)
        yield _offer(f"links {where} twice as fast", lambda: subject.again(faster))
    yield _twice_the_micro_batches(subject)
    if _may_gain_replicas(subject):
        yield _offer("stages with replicas", lambda: subject.again(replicas=None))


def _may_gain_replicas(subject: _Subject) -> bool:
    """Whether our own search, which knows replicas, has been kept from them on several ranks."""
    search, request = subject.plan.search, subject.request
    own = search is not None and search.planner == OWN
    return own and request.replicas == 1 and subject.cluster.ranks > 1


def _more_memory(subject: _Subject) -> Offer:
    change = "1 GiB more for every rank"
    limit, cluster = subject.request.memory_limit_bytes, subject.cluster
    if limit is None and all(node.device.memory_bytes is None for node in cluster.nodes):
        return Offer(change, reason="nothing: memory is not limited")
    more = None if limit is None else limit + GIB
    larger = with_memory(cluster, GIB)
    return _offer(change, lambda: subject.again(larger, memory_limit_bytes=more))


def _twice_the_micro_batches(subject: _Subject) -> Offer:
    count, batch_size = 2 * subject.plan.micro_batches, subject.request.batch_size
    change = f"{count} micro-batches"
    if count > batch_size:
        return Offer(change, reason=f"the batch has only {batch_size} samples")
    return _offer(change, lambda: subject.again(micro_batches=count))


def _offer(change: str, plan: Callable[[], Plan]) -> Offer:
    try:
        return Offer(change, plan().predicted_step_s)
    except (InfeasibleError, OutOfTimeError) as error:
        return Offer(change, reason=error.message)


def _alternatives(subject: _Subject, others: Iterable[Plan]) -> tuple[Alternative, ...]:
    """The best plans that differ in stages, schedule or micro-batches, fastest first."""
    found: dict[str, Plan] = {}
    for other in (*others, *_variations(subject)):
        words = difference(subject.plan, other)
        known = found.get(words)
        if words and (known is None or other.predicted_step_s < known.predicted_step_s):
            found[words] = other
    ranked = sorted(found.items(), key=lambda item: (item[1].predicted_step_s, item[0]))
    return tuple(Alternative(words, other) for words, other in ranked[:MOST_ALTERNATIVES])


def _variations(subject: _Subject) -> Iterator[Plan]:
    """The best plans with a decision of the chosen one changed."""
    for changes in _changes(subject):
        try:
            yield subject.again(**changes)
        except (InfeasibleError, OutOfTimeError):
            continue


def _changes(subject: _Subject) -> Iterator[dict[str, Any]]:
    """What the planner was free to choose, with another choice."""
    plan, request = subject.plan, subject.request
    if request.listed is not None:
        return
    if request.fixed_stages is None:
        for stages in _near(len(plan.stages), subject.cluster.ranks):
            yield {"stages": stages}
    if request.schedule is None and request.warm_up is None:
        yield from ({"schedule": s.name} for s in COMPARED if s.name != plan.schedule)
    if request.micro_batches is None:
        for count in _near(plan.micro_batches, request.batch_size):
            yield {"micro_batches": count}


def _near(number: int, most: int) -> Sequence[int]:
    """One less, one more, half and twice as many, where that is possible."""
    near = {number - 1, number + 1} if number <= 4 else {number // 2, 2 * number}
    return sorted(each for each in near if 1 <= each <= most)


def difference(plan: Plan, other: Plan) -> str:
    """In which of its decisions ``other`` differs; empty where in none that is named."""
    parts = []
    if len(other.stages) != len(plan.stages):
        parts.append(_count(len(other.stages), "stage"))
    if other.schedule != plan.schedule:
        parts.append(f"schedule {other.schedule}")
    if other.micro_batches != plan.micro_batches:
        plural = "" if other.micro_batches == 1 else "es"
        parts.append(f"{other.micro_batches} micro-batch{plural} of {other.micro_batch_size}")
    if not parts and other.stages != plan.stages:
        parts.append("other cuts")
    elif not parts and other.warm_up != plan.warm_up:
        parts.append("another warm-up")
    return ", ".join(parts)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
