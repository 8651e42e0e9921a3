"""Amounts of memory as texts for people: 256MiB, 13.6 GiB, or a share of what is free, 80%."""

import re
from dataclasses import dataclass

_UNITS = {"": 1, "B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}


def parse_size(text: str) -> int:
    """Bytes of "256MiB", "2GiB" or a plain number. Raises ValueError."""
    match = re.fullmatch(r"(\d{1,20}) ?([KMGT]iB|B|)", text)
    if match is None:
        raise ValueError("a number of bytes such as 268435456, 256MiB or 2GiB")
    return int(match[1]) * _UNITS[match[2]]


@dataclass(frozen=True, slots=True)
class Share:
    """So many hundredths of the memory that is free once it is asked for."""

    percent: int

    def of(self, num_bytes: int) -> int:
        """Bytes of it, where so many are free."""
        return num_bytes * self.percent // 100


def parse_amount(text: str) -> int | Share:
    """Bytes as for parse_size, or the share of "80%". Raises ValueError."""
    if match := re.fullmatch(r"(\d{1,3})%", text):
        return Share(int(match[1]))
    try:
        return parse_size(text)
    except ValueError as error:
        raise ValueError(f"{error}, or a share such as 80%") from None


def size(amount: int | Share) -> str:
    """A number of bytes, or a share, as a short text."""
    if isinstance(amount, Share):
        return f"{amount.percent}%"
    value = float(amount)
    for unit in ("B", "KiB", "MiB"):
        if value < 1024:
            return f"{value:.4g} {unit}"
        value /= 1024
    return f"{value:.4g} GiB" if value < 10_000 else f"{value / 1024:.4g} TiB"
