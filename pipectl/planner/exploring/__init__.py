"""Which partitions are tried, in which order, until no other can be faster."""
