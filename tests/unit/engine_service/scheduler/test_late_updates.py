"""Answers that tell of a table entry of a sequence which the same step releases."""

import numpy as np
import pytest

from kvkeeper.cache_service.core.values.step_columns import StepReply
from kvkeeper.engine_service.scheduler.plan import Plan
from tests.support.worlds.scheduler_world import World, make_request

pytestmark = pytest.mark.usefixtures("each_cache")


def test_a_block_that_a_released_sequence_gave_up_and_that_was_cleared_is_no_copy_of_it() -> None:
    """Its last entry was replaced, it went, and that very block was granted to another tenant, all in one step."""
    world = World(num_blocks=64, block_size=2)
    answer_of, num_told, block = world.cache.step, [0], np.array([63], np.int32)

    def step(plan: Plan) -> StepReply:
        answer = answer_of(plan)
        for sequence_id in plan.release_ids.tolist():
            num_told[0] += 1
            answer = answer._replace(
                update_ids=np.append(answer.update_ids, np.int64(sequence_id)),
                update_table_idx=np.append(answer.update_table_idx, np.int32(0)),
                update_block_ids=np.append(answer.update_block_ids, block),
                copy_sources=np.append(answer.copy_sources, np.int32(0)),
                copy_destinations=np.append(answer.copy_destinations, block),
            )
        return answer

    world.cache.step = step
    first = world.submit(make_request([1, 2, 0, 1], 2))
    second = world.submit(make_request([2, 1, 0], 6))
    world.run()
    world.check_outputs()
    assert num_told[0] > 0
    assert (first.num_copied_blocks, second.num_copied_blocks) == (0, 0)
