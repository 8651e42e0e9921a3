"""Row 1: block accounting is exact in pools of several groups of layers, and no token reads what is not its own.

Full attention stands beside sliding windows, chunks and states, in pools that are too small. The pool is audited before and
after every step, the tables that the engine was told are compared with the pool's, and all that they still read is compared
with what was written for it.
"""

from kvkeeper.cache_service.core.eviction import POLICY_NAMES
from kvkeeper.cache_service.core.values.kv_spec import ReadSpan, state_span
from tests.soak.row import Counts
from tests.support.reference.read_spans import make_spans
from tests.support.worlds.grouped import GroupedWorld

_STEPS_PER_SEED = 300
_SHAPES = [  # what each group reads, the blocks of the pool, tokens of a block
    (make_spans(0, 9), 60, 4),
    ((*make_spans(0), state_span(3)), 60, 4),
    (make_spans(0, 3, 17, 6), 220, 2),
    ((*make_spans(0, 9), state_span(2)), 80, 4),
    ((*make_spans(0, 7), ReadSpan(6, is_chunk=True), ReadSpan(12, is_chunk=True)), 160, 4),
    ((*make_spans(0, 0), state_span(2), ReadSpan(6, is_chunk=True), state_span(3)), 150, 2),
]


def run(seed: int) -> Counts:
    """Counts items of steps; faults are cuts, hand-overs, refusals, and sessions that end with their device work under way."""
    spans, num_blocks, block_size = _SHAPES[seed % len(_SHAPES)]
    world = GroupedWorld(seed, spans, num_blocks, block_size, POLICY_NAMES[seed // len(_SHAPES) % len(POLICY_NAMES)])
    for _ in range(_STEPS_PER_SEED):
        world.run_step()
    return Counts(world.num_items, world.num_cut + world.num_handed + world.num_refused + world.num_ended)
