"""A finished profile for people and for programs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipectl.cli.console import note, say, say_json
from pipectl.profile import Profile
from pipectl.units import format_bytes, format_time

if TYPE_CHECKING:
    from pipectl.jobs.profile import Measurement

_SPANS = ((86400, "day"), (3600, "h"), (60, "min"))


def show(found: Measurement, path: Path, now: float, *, as_json: bool) -> None:
    """Print what was measured, where it is, and whether it was measured now.

    Args:
        now: seconds since the epoch.
    """
    if as_json:
        say_json({**summary_json(found.profile, path), **found.to_json()})
        return
    say(summary(found.profile))
    say(f"profile: {path}")
    tell_origin(found, now, "--again measures anew")


def tell_origin(found: Measurement, now: float, again: str) -> None:
    """Note that a profile, or a part of it, is not from now.

    Args:
        again: how to measure all of it.
    """
    entry = found.entry
    if found.cached:
        model = found.profile.device.model if found.profile.device else "another device"
        when = ago(now - entry.measured_at)
        note(f"cached: measured {when} on {entry.host} ({model}); {again}")
    elif found.resumed:
        note(f"{found.resumed} measurements are from an earlier attempt that was interrupted")


def summary(profile: Profile) -> str:
    """One line."""
    forward_s, backward_s = totals(profile)
    loading = f" ({format_time(profile.loading_s)} loading)" if profile.loading_s else ""
    return (
        f"{profile.name}: {len(profile.operators)} operators, "
        f"{format_bytes(parameter_bytes(profile))} of parameters; forward {format_time(forward_s)}"
        f"{loading}, backward {format_time(backward_s)} for {profile.micro_batch_size} samples"
    )


def summary_json(profile: Profile, path: Path) -> dict[str, Any]:
    """The same and more, for programs; times in seconds."""
    others = {size for operator in profile.operators for size in operator.timings}
    forward_s, backward_s = totals(profile)
    device = profile.to_json().get("device")
    return {
        "file": str(path.absolute()),
        "name": profile.name,
        "operators": len(profile.operators),
        "micro_batch_size": profile.micro_batch_size,
        "micro_batch_sizes": sorted({profile.micro_batch_size, *others}),
        "parameter_bytes": parameter_bytes(profile),
        "forward_s": forward_s,
        "backward_s": backward_s,
        "device": device,
    }


def totals(profile: Profile) -> tuple[float, float]:
    """Forward and backward of all operators, in seconds a micro-batch."""
    forward_s = sum(operator.forward_s for operator in profile.operators)
    return forward_s, sum(operator.backward_s for operator in profile.operators)


def parameter_bytes(profile: Profile) -> int:
    """Bytes of all parameters, shared ones once."""
    return sum(dict(p for operator in profile.operators for p in operator.parameters).values())


def ago(age_s: float) -> str:
    """``3 h ago``; in the largest unit that fits."""
    for span_s, unit in _SPANS:
        count = int(age_s // span_s)
        if count > 0:
            return f"{count} {unit}{'s' if unit == 'day' and count > 1 else ''} ago"
    return "just now"
