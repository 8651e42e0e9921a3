"""A scheduler world with a group of layers that keep states: a page holds all tokens that its state knows."""

from typing import Any

import numpy as np

from kvkeeper.engine_service.scheduler.limits import WHOLE, ReadSpan
from kvkeeper.engine_service.values.request import SequenceState
from tests.support.worlds.core_cache import CoreCache
from tests.support.worlds.scheduler_world import Flight, World


class StateWorld(World):
    """On the real core. Each step has to find the state behind the tokens before its own."""

    def __init__(self, checkpoint_blocks: int = 2, **options: Any) -> None:
        spans = (WHOLE, ReadSpan(2, checkpoint_blocks=checkpoint_blocks))
        super().__init__(make_cache=CoreCache, group_spans=spans, **options)
        self.checkpoint_blocks = checkpoint_blocks
        self.num_states_read = self.num_checkpoints = 0

    def _compute(self, flight: Flight) -> None:
        if flight.work.batch is not None:
            self._compute_states(flight)
        super()._compute(flight)

    def _compute_states(self, flight: Flight) -> None:
        batch, size = flight.work.batch, self.limits.block_size
        assert batch is not None
        assert batch.group_tables is not None
        writes: dict[int, tuple[object, ...]] = {}
        for item, sequence in enumerate(flight.work.sequences):
            end = int(batch.seq_lens[item])
            start = end - int(np.diff(batch.query_start_loc)[item])
            table, is_late = batch.group_tables[item, 0].tolist(), sequence.state is SequenceState.ENDED
            tokens = self._tokens(sequence)[:end]
            if start and not is_late:
                assert self.memory[table[(start - 1) // size] * size] == ("state", *tokens[:start]), "another state"
                self.num_states_read += 1
            assert table[(end - 1) // size], "a state without a page"
            for entry in range(start // size, (end - 1) // size + 1):
                if table[entry]:
                    place = table[entry] * size
                    assert place not in writes, "two writers of a page"
                    writes[place] = ("late",) if is_late else ("state", *tokens[: min((entry + 1) * size, end)])
                    self.num_checkpoints += (entry + 1) % self.checkpoint_blocks == 0 and (entry + 1) * size <= end
        self.memory |= writes
