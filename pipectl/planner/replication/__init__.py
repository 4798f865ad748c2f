"""Stages and numbers of replicas for very many ranks, to begin a search with."""

from pipectl.planner.replication.proposals import Proposal, replica_counts

__all__ = ["Proposal", "replica_counts"]
