"""Amounts of memory as texts for people: 256MiB, 13.6 GiB."""

import re

_UNITS = {"": 1, "B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}


def parse_size(text: str) -> int:
    """Bytes of "256MiB", "2GiB" or a plain number. Raises ValueError."""
    match = re.fullmatch(r"(\d{1,20}) ?([KMGT]iB|B|)", text)
    if match is None:
        raise ValueError("a number of bytes such as 268435456, 256MiB or 2GiB")
    return int(match[1]) * _UNITS[match[2]]


def size(num_bytes: int) -> str:
    """A number of bytes as a short text."""
    value = float(num_bytes)
    for unit in ("B", "KiB", "MiB"):
        if value < 1024:
            return f"{value:.4g} {unit}"
        value /= 1024
    return f"{value:.4g} GiB" if value < 10_000 else f"{value / 1024:.4g} TiB"
