"""Watching ranks from outside: one small process per node, which outlives whatever ends a rank.

Each watcher knows of its ranks whether they live, how they ended and what they do (``rank``,
``board``), and writes that to one file per node (``files``). One pure function of the files of all
nodes, and of how old they are, says which rank is lost (``judge``). The watcher of the first node
reads all files and decides; the others read the first one's, and decide themselves if that falls
silent (``watcher``). These modules use the standard library, and little of it.
"""
