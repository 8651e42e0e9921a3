"""Plain text tables."""

from collections.abc import Sequence

from kvkeeper.common.service.sizes import size as size


def table(headers: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Columns under their headers; numbers are aligned to the right, texts to the left."""
    cells = [[_text(cell) for cell in row] for row in rows]
    widths = [max(len(row[column]) for row in [list(headers), *cells]) for column in range(len(headers))]
    numeric = [bool(rows) and all(isinstance(row[column], int | float) for row in rows) for column in range(len(headers))]

    def line(row: Sequence[str]) -> str:
        parts = (
            cell.rjust(width) if right else cell.ljust(width) for cell, width, right in zip(row, widths, numeric, strict=True)
        )
        return "  ".join(parts).rstrip()

    return "\n".join([line(headers), line(["-" * width for width in widths]), *map(line, cells)])


def facts(rows: Sequence[tuple[str, object]], indent: str = "") -> str:
    """One line per name, with its value."""
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{indent}{name.ljust(width)}  {_text(value)}" for name, value in rows)


def _text(cell: object) -> str:
    if isinstance(cell, bool):
        return "yes" if cell else "no"
    if isinstance(cell, int):
        return f"{cell:,}"
    return f"{cell:.2f}" if isinstance(cell, float) else str(cell)
