"""The processor's last level cache."""

from __future__ import annotations

from pathlib import Path

_CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
_ASSUMED_BYTES = 32 << 20


def last_level_bytes(caches: Path = _CACHES) -> int:
    """Size of the largest cache of this machine; 32 MiB if it does not say."""
    sizes = [_bytes(index / "size") for index in caches.glob("index*")]
    return max(sizes, default=0) or _ASSUMED_BYTES


def _bytes(path: Path) -> int:
    try:
        text = path.read_text(encoding="ascii").strip()
    except OSError:
        return 0
    number, factor = (text[:-1], 1024) if text.endswith("K") else (text, 1)
    return int(number) * factor if number.isdigit() else 0
