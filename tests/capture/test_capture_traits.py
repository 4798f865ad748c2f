"""What decides how exactly a training can be repeated."""

from __future__ import annotations

from pipectl.capture.traits import find_traits


def test_traits_of_a_model_without_any(make_spec) -> None:
    traits = find_traits(make_spec("mlp"), 4)
    assert (traits.random, traits.shared) == ((), ())


def test_random_operators_and_shared_parameters_are_named(make_spec) -> None:
    assert find_traits(make_spec("Dropping"), 4).random == ("dropout",)
    here = __file__.replace("capture/test_capture_traits.py", "equality/models.py")
    spec = make_spec(f"{here}:tied", loss=f"{here}:token_loss", data=f"{here}:Tokens")
    assert find_traits(spec, 4).shared == ("tokens.weight",)
