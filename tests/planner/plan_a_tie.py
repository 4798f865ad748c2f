"""Prints a plan full of ties; run under several hash seeds by a test."""

import json

from pipectl.cluster import assumed_cluster
from pipectl.planner import PlanRequest, make_plan
from pipectl.profile import Operator, Profile


def main() -> None:
    operators = []
    edges = []
    for layer in range(6):
        for branch in range(3):
            node = f"b{layer}.{branch}"
            operators.append(
                Operator(
                    node, node, 1e-3, 2e-3, 0, 1000, 1000, ((f"p{branch}", 10),), ((node, 10),)
                )
            )
            edges += [(f"b{layer - 1}.{other}", node) for other in range(3)] if layer else []
    profile = Profile("tie", "test", 8, tuple(operators), tuple(edges))
    cluster = assumed_cluster("c", [2, 2], 1, 2**28)
    document = make_plan(profile, cluster, PlanRequest("job", 64)).to_json()
    document["search"].pop("planning_s")
    print(json.dumps(document))


if __name__ == "__main__":
    main()
