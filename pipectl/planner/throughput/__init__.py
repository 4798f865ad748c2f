"""Steady-state throughput of very many devices: stages x replicas x tensor parallelism x memory."""

from pipectl.planner.throughput.request import (
    ThroughputPlan,
    ThroughputRequest,
    ThroughputStage,
)
from pipectl.planner.throughput.search import plan_throughput

__all__ = ["ThroughputPlan", "ThroughputRequest", "ThroughputStage", "plan_throughput"]
