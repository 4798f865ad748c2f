"""The operator graph as sets of blocks: what stages can be, and what they cost as spans."""
