"""What the rows of a kept index say, without arrays: the reference model of kept memory, of both tiers.

A row is what one block's row says. `believed` follows each one up to its root, and gives up on rows that contradict each other.
"""

from typing import NamedTuple

Chain = tuple[int, tuple[int, ...]]  # root, and the tokens from it down to a block; blocks are of one token


class NaiveRow(NamedTuple):
    """Of one block of a tier. parent: the name of a node, or a root, which is negative."""

    block: int
    name: int
    parent: int
    token: int


def believed(tiers: tuple[list[NaiveRow], list[NaiveRow]], num_roots: int) -> dict[Chain, tuple[int, int]]:
    """The device block and the host block, 0 for none, of each chain that leads to a known root."""
    nodes: dict[int, tuple[int, int]] = {}
    places: dict[int, list[int]] = {}
    for tier, rows in enumerate(tiers):
        for row in rows:
            told = places.setdefault(row.name, [0, 0])
            if row.name < 1 or told[tier] or nodes.setdefault(row.name, (row.parent, row.token)) != (row.parent, row.token):
                return {}
            told[tier] = row.block
    found: dict[Chain, tuple[int, int]] = {}
    for name in nodes:
        above, tokens = name, list[int]()
        while above in nodes and len(tokens) <= len(nodes):
            above, token = nodes[above]
            tokens.insert(0, token)
        if -num_roots <= above < 0:
            chain = above, tuple(tokens)
            if chain in found:
                return {}
            found[chain] = (places[name][0], places[name][1])
    return found
