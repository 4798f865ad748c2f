"""The section of the spec that says how the model is spread over the ranks."""

from __future__ import annotations

from pydantic import Field

from pipectl.spec.section import Section
from pipectl.spec.values import (
    AutoCount,
    AutoCounts,
    AutoReplicas,
    Backward,
    Bytes,
    Flag,
    Line,
    Offload,
    Recompute,
    Schedule,
)


class Pipeline(Section):
    """How the model is spread over the ranks. The planner chooses where it says `auto`."""

    stages: AutoCount = Field(
        default=None,
        description="Parts the model is cut into: at most one a rank, with the schedules "
        "`interleaved` and `looped-bfs` a multiple of the ranks, with `zb-v` and `dualpipev` two "
        "a rank.",
    )
    micro_batches: AutoCount = Field(default=None, description="Parts each batch is cut into.")
    schedule: Schedule = Field(
        default=None,
        description="Order of work: `gpipe` runs all forwards before the backwards, `1f1b` "
        "alternates them and keeps fewer activations, `interleaved` does so with several stages a "
        "rank (two, unless `stages` says otherwise), for less waiting and more messages; "
        "`looped-bfs` is `gpipe` with several stages a rank. `zb-h1`, `zb-v` and `dualpipev` "
        "(the last two with two stages a rank) make the gradients of weights while they would "
        "wait otherwise. `pipedream` and `pipedream-2bw` let steps overlap, with gradients of "
        "older weights: no waiting, but other results. Or your own: a `.csv` file of actions, "
        "relative to this file, or the name of one that a package offers.",
    )
    warm_up: AutoCounts = Field(
        default=None,
        description="Forwards each stage runs before its first backward, one number a stage; needs "
        "`stages`.",
    )
    replicas: AutoReplicas = Field(
        default=None,
        description="Copies of each stage, which take micro-batches in turn and add up their "
        "gradients: a number, or `any` to let the planner choose stage by stage; `auto` is 1. "
        "Sums over copies round otherwise than one rank does, and the running statistics of a "
        "BatchNorm become means over the copies.",
    )
    shard_optimizer: Flag = Field(
        default=False,
        description="Whether each copy of a stage keeps the optimizer state of a part of its "
        "parameters (ZeRO stage 1): less memory, the same results, messages after each step.",
    )
    recompute: Recompute = Field(
        default=None,
        description="Which stages keep only what they receive, and compute their forward once more "
        "before their backward: `all` of them at once, or `blocks`, one part of a stage after the "
        "other, beside the inputs of all parts. `auto`: those that do not fit into memory "
        "otherwise; in blocks if they do not fit at once; and of `backward: apart`, those whose "
        "links carry what they receive faster than what they save.",
    )
    offload: Offload = Field(
        default=None,
        description="Where what stages keep for their backward waits meanwhile: `host` is the "
        "memory beside accelerators, `disk` a file on each node. `auto`: on accelerators `host`, "
        "on CPUs `disk` where the cluster file gives its bandwidth; for stages for which it pays.",
    )
    offload_directory: Line | None = Field(
        default=None,
        description="Directory of each node for `disk`, where variables of its environment may "
        "stand; by default its directory for temporary files (`TMPDIR`).",
    )
    backward: Backward = Field(
        default="together",
        description="Where the backward of a stage runs: `together` with its forward, or `apart`, "
        "each on a rank of its own, the second with the optimizer. What a backward needs is then "
        "sent. `auto`: apart where that is faster.",
    )
    memory_limit: Bytes | None = Field(
        default=None,
        description="Resident memory of a rank, the process itself included; by default its share "
        "of `resources.memory_per_node`, where that is given.",
    )

    @property
    def memory_limit_bytes(self) -> int | None:
        """Bytes a rank may hold."""
        return self.memory_limit
