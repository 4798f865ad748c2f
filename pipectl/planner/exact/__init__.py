"""The smallest largest stage load of a graph, exactly: an answer with a proof."""
