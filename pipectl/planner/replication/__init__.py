"""Stages with replicas: which are tried, and what they take; proposals for very many ranks."""

from pipectl.planner.replication.proposals import Proposal, replica_counts

__all__ = ["Proposal", "replica_counts"]
