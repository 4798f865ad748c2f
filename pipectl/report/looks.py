"""How kinds of actions look in pictures of a step, and what they are called there."""

FILLS = {
    "forward": "░",
    "backward": "█",
    "backward_input": "█",
    "backward_weight": "▓",
    "recompute": "▒",
    "reduce_wait": "R",
    "update": "U",
    "evaluate": "E",
}
"""Characters, of all kinds that are drawn."""
COLOURS = {
    "forward": "#7fb3d5",
    "backward": "#e59866",
    "backward_input": "#e59866",
    "backward_weight": "#c9a9dc",
    "recompute": "#b6d3e6",
    "reduce_wait": "#e3c567",
    "update": "#82b366",
    "evaluate": "#aab7b8",
}
NAMES = {
    "forward": "forward",
    "recompute": "forward again",
    "backward": "backward",
    "backward_input": "backward (inputs)",
    "backward_weight": "backward (weights)",
    "reduce_wait": "sum of gradients",
    "update": "update",
    "evaluate": "evaluation",
}
