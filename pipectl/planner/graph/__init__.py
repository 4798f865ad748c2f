"""The operator graph as sets of blocks: what must share a stage, and where it can be cut."""
