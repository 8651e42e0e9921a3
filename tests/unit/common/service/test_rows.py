"""Long rows cost memory only where they are written."""

import resource
from pathlib import Path

from kvkeeper.common.rows import untouched


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def test_short_sequences_in_rows_for_the_longest_take_a_page_each() -> None:
    before = resident_bytes()
    rows = untouched(256, 1 << 18)
    rows[:, :8] = 7
    assert resident_bytes() - before < 16 << 20  # a large page for each row would be 256 MiB
    assert rows[:, 8:64].sum() == 0
    assert rows.nbytes == 256 << 20
