"""docs/fork.svg: block tables before a fork, after it, and with the next token of each, as tiny_cache.py plays it."""

from dataclasses import dataclass

from kvkeeper.cache_service.tiny_cache import Sequence, TinyCache, story

_TITLES = ("before the fork", "after the fork", "with the 7th token of each")
_PANEL, _HEIGHT, _LEFT = 300, 216, 24  # width of a panel, height of all, left edge within a panel
_CELL, _BLOCK, _GAP = 30, 76, 10  # sizes of a table's entry and of a block, and what is between blocks
_TABLES_TOP, _BLOCKS_TOP, _APART = 62, 142, 130  # where tables and blocks begin, and how far two tables are apart
_ALONE, _SHARED, _FREE = "#cfe3f7", "#f9d99a", "#ffffff"


@dataclass(frozen=True, slots=True)
class _Panel:
    """What is drawn of a moment: each sequence's table, and the tokens that each block has slots for."""

    tables: dict[int, list[int]]
    tokens: dict[int, list[int]]


def page() -> str:
    width = _PANEL * len(_TITLES)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {_HEIGHT}" font-family="sans-serif" font-size="13">',
        "<title>Two block tables that share blocks after a fork, and part by a copy before the first write</title>",
        f'<rect width="{width}" height="{_HEIGHT}" fill="#ffffff"/>',
    ]
    for number, panel in enumerate(_panels()):
        lines += _drawn(panel, _TITLES[number], number * _PANEL + _LEFT)
    return "\n".join([*lines, "</svg>", ""])


def _panels() -> list[_Panel]:
    moments = [_panel(cache) for _, cache in story()]
    return [_Panel({1: moments[1].tables[1]}, moments[1].tokens), moments[1], moments[2]]


def _panel(cache: TinyCache) -> _Panel:
    tokens: dict[int, list[int]] = {}
    for sequence in cache.sequences.values():
        for block, own in _by_block(sequence, cache.block_size).items():
            tokens[block] = max(tokens.get(block, []), own, key=len)
    return _Panel({sequence_id: list(each.table) for sequence_id, each in cache.sequences.items()}, tokens)


def _by_block(sequence: Sequence, size: int) -> dict[int, list[int]]:
    known = sequence.tokens[: sequence.num_reserved]
    return {block: known[idx * size : (idx + 1) * size] for idx, block in enumerate(sequence.table)}


def _drawn(panel: _Panel, title: str, left: int) -> list[str]:
    holders = [block for table in panel.tables.values() for block in table]
    lines = [f'<text x="{left}" y="22" font-weight="bold">{title}</text>']
    for row, (sequence_id, table) in enumerate(panel.tables.items()):
        top, edge = _TABLES_TOP, left + 30 + row * _APART
        lines.append(f'<text x="{edge}" y="{top - 8}">sequence {sequence_id}</text>')
        for idx, block in enumerate(table):
            x = edge + idx * _CELL
            lines.append(_box(x, top, _CELL, _CELL, _FREE, str(block)))
            middle = left + (block - 1) * (_BLOCK + _GAP) + _BLOCK // 2
            color = "#7a7a7a" if row == 0 else "#b06a00"
            lines.append(f'<path d="M{x + _CELL // 2} {top + _CELL}L{middle} {_BLOCKS_TOP}" stroke="{color}" fill="none"/>')
    for block in sorted({1, 2, 3}):
        x = left + (block - 1) * (_BLOCK + _GAP)
        fill = {0: _FREE, 1: _ALONE}.get(holders.count(block), _SHARED)
        text = " ".join(map(str, panel.tokens.get(block, []))) or "free"
        lines.append(_box(x, _BLOCKS_TOP, _BLOCK, 34, fill, text))
        lines.append(f'<text x="{x + _BLOCK // 2}" y="{_BLOCKS_TOP + 54}" text-anchor="middle">block {block}</text>')
    return lines


def _box(x: int, y: int, width: int, height: int, fill: str, text: str) -> str:
    rect = f'<rect x="{x}" y="{y}" width="{width}" height="{height}" fill="{fill}" stroke="#333333"/>'
    return f'{rect}<text x="{x + width // 2}" y="{y + height // 2 + 5}" text-anchor="middle">{text}</text>'
