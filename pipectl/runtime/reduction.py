"""Sums of gradients over the replicas of a stage, under way while the rank computes.

The gradients of a stage travel in buckets, the last layers' first, because a backward makes them
first. A bucket starts as soon as the stage's last backward of the step has made all of it, the rest
right behind that backward. Autograd adds to a parameter once a backward, so a gradient is whole
when its hook is called. The sums are awaited at the end of the step, behind the backwards of the
rank's other stages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from torch import Tensor
from torch.utils.hooks import RemovableHandle

from pipectl.plan.sums import BUCKET_BYTES
from pipectl.runtime.buckets import Bucket
from pipectl.runtime.exchange import Exchange


class StageReduction:
    """The sums of one stage.

    Args:
        leaves: by a name that all replicas give them, in model order: what the stage accumulates
            gradients in.
        owners: the replica that alone gets the sum of a leaf; all get those of others.
        branches: whether a step may leave some leaves without gradient: those that no replica has
            one of get none.
    """

    def __init__(
        self,
        stage: int,
        exchange: Exchange,
        leaves: Mapping[str, Tensor],
        owners: Mapping[str, int] | None = None,
        bucket_bytes: int = BUCKET_BYTES,
        *,
        branches: bool = False,
    ) -> None:
        self.stage = stage
        self._branches = branches
        self._known: set[str] = set()
        self._exchange = exchange
        self._leaves = leaves
        self._owners = owners or {}
        self._bucket_bytes = bucket_bytes
        self._buckets: list[Bucket] = []
        self._arriving: list[Bucket] = []
        self._missing: dict[int, int] = {}
        self._hooks: list[RemovableHandle] = []
        self._armed = False

    def learn(self) -> None:
        """Agree, after a first backward, on what has gradients, with what had some in earlier ones.

        Collective among the replicas.
        """
        mine = [name for name, leaf in self._leaves.items() if leaf.grad is not None]
        self._known |= self._exchange.agreed(mine)
        known = self._leaves if self._branches else self._known
        names = [name for name in reversed(list(self._leaves)) if name in known]
        groups = _groups(names, self._leaves, self._owners, self._bucket_bytes)
        self._buckets = [
            self._bucket([self._leaves[name] for name in group], owner, index)
            for index, (owner, group) in enumerate(groups)
        ]
        for handle in self._hooks:
            handle.remove()
        self._hooks = [
            leaf.register_post_accumulate_grad_hook(self._hook(index))  # type: ignore[no-untyped-call]
            for index, bucket in enumerate(self._buckets)
            for leaf in bucket.leaves
        ]

    def _bucket(self, leaves: Sequence[Tensor], owner: int | None, index: int) -> Bucket:
        return Bucket(self._exchange, leaves, owner, 2 * index, with_flags=self._branches)

    def arm(self) -> None:
        """The next backward is the last one of the step."""
        self._missing = {i: len(bucket.leaves) for i, bucket in enumerate(self._buckets)}
        self._armed = True

    def start(self) -> None:
        """All gradients are there: start what has not started."""
        self._armed = False
        for bucket in self._buckets:
            if not bucket.started:
                self._start(bucket)

    def advance(self) -> None:
        """Go on with what has arrived: looks once at every bucket that is on its way."""
        self._arriving = [bucket for bucket in self._arriving if not bucket.advance()]

    def finish(self) -> None:
        """Return when every gradient is the sum over all replicas."""
        for bucket in self._arriving:
            bucket.settle()
        self._arriving = []
        for bucket in self._buckets:
            bucket.finish()

    def _hook(self, index: int) -> Callable[[Tensor], None]:
        return lambda _: self._made(index)

    def _made(self, index: int) -> None:
        """A leaf of a bucket has its gradient."""
        if not self._armed:
            return
        self._missing[index] -= 1
        if not self._missing[index]:
            self._start(self._buckets[index])

    def _start(self, bucket: Bucket) -> None:
        bucket.start()
        self._arriving.append(bucket)


class Reducer:
    """The sums of all stages of a rank that have replicas."""

    def __init__(self, stages: Iterable[StageReduction]) -> None:
        self._stages = {item.stage: item for item in stages}

    def learn(self) -> None:
        """See :meth:`StageReduction.learn`; before that, nothing is summed."""
        for item in self._stages.values():
            item.learn()

    def arm(self, stage: int) -> None:
        """The next backward of a stage is its last one."""
        self._stages[stage].arm()

    def start(self, stage: int) -> None:
        """Begin to sum a stage's gradients."""
        self._stages[stage].start()

    def finish(self, stage: int) -> None:
        """Wait for the sums of a stage, while those of others go on."""
        self._stages[stage].finish()

    def advance(self) -> None:
        """Go on with what has arrived; called between actions, after messages have advanced."""
        for item in self._stages.values():
            item.advance()


def _groups(
    names: Sequence[str],
    leaves: Mapping[str, Tensor],
    owners: Mapping[str, int],
    bucket_bytes: int,
) -> list[tuple[int | None, list[str]]]:
    """Names in buckets of one owner, type and device, each closed when it is large enough."""
    found: list[tuple[int | None, list[str]]] = []
    open_: dict[object, list[str]] = {}
    for name in names:
        leaf, owner = leaves[name], owners.get(name)
        key = owner, leaf.dtype, leaf.device
        if key not in open_:
            open_[key] = []
            found.append((owner, open_[key]))
        open_[key].append(name)
        if sum(leaves[other].nbytes for other in open_[key]) >= bucket_bytes:
            del open_[key]
    return found
