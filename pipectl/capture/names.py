"""Names in the exported step, which holds the model, and in the user's model itself."""

_MODEL = "model"
_WITHIN = f"{_MODEL}."


def in_model(name: str) -> bool:
    """Whether a parameter, buffer or submodule of the step belongs to the user's model."""
    return name.startswith(_WITHIN)


def own_name(name: str) -> str:
    """What the user's model calls it."""
    return name.removeprefix(_WITHIN)


def own_path(path: str) -> str:
    """The same for a module, which may be the model itself: that is empty."""
    return "" if path == _MODEL else own_name(path)
