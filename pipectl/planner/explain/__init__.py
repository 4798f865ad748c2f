"""The analysis of a plan: where its time goes, and what changes would bring."""
