"""One file per command: its options, one use case, its output."""
