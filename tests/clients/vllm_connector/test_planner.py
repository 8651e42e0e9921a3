"""What the connector for vLLM looks up, loads and stores, and when: its planner, with look-ups that a test answers."""

from collections.abc import Sequence

import numpy as np
import pytest

from kvkeeper.vllm.orders import Load, Scope, Store, TokenIds
from kvkeeper.vllm.planner import Planner, Scheduled

SIZE = 4
SCOPE = Scope("ad" * 32, "a salt")


class Told:
    """Look-ups: cached holds the tokens that are cached of each request; None is not answered yet."""

    def __init__(self) -> None:
        self.cached: dict[str, int | None] = {}
        self.asked: list[tuple[str, Scope]] = []
        self.forgotten: list[str] = []

    def ask(self, request_id: str, token_ids: TokenIds, scope: Scope) -> None:
        self.asked.append((request_id, scope))
        self.cached.setdefault(request_id, 0)

    def answer(self, request_id: str) -> int | None:
        return self.cached[request_id]

    def forget(self, request_id: str) -> None:
        self.forgotten.append(request_id)


@pytest.fixture
def told() -> Told:
    return Told()


@pytest.fixture
def planner(told: Told) -> Planner:
    return Planner(SIZE, told)


def tokens(count: int) -> TokenIds:
    return np.arange(count, dtype=np.int32)


def load_of(load: Load) -> tuple[str, list[int], int, list[int]]:
    return load.request_id, load.token_ids.tolist(), load.first_block, list(load.block_ids)


def store_of(store: Store) -> tuple[str, list[int], list[int]]:
    return store.request_id, store.token_ids.tolist(), list(store.block_ids)


def run(planner: Planner, num_tokens: int, block_ids: Sequence[int], *, whole: bool = True) -> list[Store]:
    """A step in which request a is computed up to num_tokens; the stores that it orders."""
    return planner.step([Scheduled("a", num_tokens, block_ids, whole)]).stores


@pytest.mark.parametrize(
    ("num_tokens", "cached", "own", "wanted"),
    [
        (9, 8, 0, 8),
        (8, 8, 0, 4),  # a token is left to compute
        (9, 7, 0, 4),  # whole blocks only
        (9, 3, 0, 0),
        (9, 8, 4, 4),  # vLLM has the first block itself
        (9, 4, 8, 0),  # vLLM has more
        (9, 8, 3, 0),  # vLLM has a part of a block
        (9, 4000, 0, 8),
    ],
)
def test_a_hit_is_of_whole_blocks_and_leaves_a_token(
    planner: Planner, told: Told, num_tokens: int, cached: int, own: int, wanted: int
) -> None:
    planner.arrive("a", tokens(num_tokens), Scope())
    told.cached["a"] = cached
    assert planner.match("a", own) == wanted


def test_an_answer_that_is_not_there_is_waited_for(planner: Planner, told: Told) -> None:
    planner.arrive("a", tokens(9), SCOPE)
    told.cached["a"] = None
    assert planner.match("a", 0) is None
    told.cached["a"] = 8
    assert planner.match("a", 0) == 8
    planner.arrive("a", tokens(9), SCOPE)
    assert told.asked == [("a", SCOPE)], "vLLM's second call asks nothing again"


def test_a_prompt_without_a_whole_block_before_its_last_token_is_left_alone(planner: Planner, told: Told) -> None:
    planner.arrive("a", tokens(SIZE), Scope())
    assert planner.match("a", 0) == 0
    assert not told.asked
    assert not planner.finish("a", tokens(40), 39, range(10))


def test_what_vllm_gave_blocks_for_is_loaded_behind_what_it_has(planner: Planner, told: Told) -> None:
    planner.arrive("a", tokens(14), SCOPE)
    told.cached["a"] = 12
    assert planner.match("a", 4) == 8
    planner.allocate("a", [7, 5, 9, 3], 8)
    planner.allocate("a", [7, 5, 9, 3], 0)  # vLLM's second call, when the load is done
    (load,) = planner.step([]).loads
    assert load_of(load) == ("a", list(range(12)), 1, [5, 9])
    assert load.scope == SCOPE
    assert not planner.step([]).loads, "an order is given once"


def test_a_prompt_is_stored_with_the_step_that_computes_its_last_token(planner: Planner) -> None:
    planner.arrive("a", tokens(10), SCOPE)
    assert planner.match("a", 0) == 0
    assert run(planner, 6, [3, 4]) == []
    (store,) = run(planner, 10, [8], whole=False)
    assert store_of(store) == ("a", list(range(8)), [3, 4])
    assert store.scope == SCOPE
    assert run(planner, 11, [], whole=False) == []


def test_what_the_service_has_is_not_stored_again(planner: Planner, told: Told) -> None:
    planner.arrive("a", tokens(10), Scope())
    told.cached["a"] = 8
    planner.match("a", 0)
    planner.allocate("a", [1, 2, 3], 8)
    assert run(planner, 10, [1, 2, 3]) == []
    assert not planner.finish("a", tokens(11), 10, [1, 2, 3])


def test_what_was_generated_is_stored_at_the_end_and_held_until_then(planner: Planner) -> None:
    planner.arrive("a", tokens(10), Scope())
    planner.match("a", 0)
    run(planner, 10, [1, 2, 3])
    assert planner.finish("a", tokens(17), 17, [1, 2, 3, 4, 5])
    orders = planner.step([])
    assert [store_of(store) for store in orders.stores] == [("a", list(range(16)), [1, 2, 3, 4])]
    assert orders.held == ["a"]
    assert not planner.step([]).held


def test_the_last_token_was_drawn_and_not_computed(planner: Planner) -> None:
    planner.arrive("a", tokens(10), Scope())
    planner.match("a", 0)
    run(planner, 10, [1, 2, 3])
    assert planner.finish("a", tokens(12), 12, [1, 2, 3])
    orders = planner.step([])
    assert (orders.stores, orders.held) == ([], ["a"]), "held for the store of its prompt"


def test_without_store_generated_the_prompt_alone_is_stored(told: Told) -> None:
    planner = Planner(SIZE, told, store_generated=False)
    planner.arrive("a", tokens(10), Scope())
    planner.match("a", 0)
    assert len(run(planner, 10, [1, 2, 3])) == 1
    assert planner.finish("a", tokens(40), 39, range(1, 11))
    assert not planner.step([]).stores


def test_a_request_that_ends_while_it_is_loaded_stores_nothing(planner: Planner, told: Told) -> None:
    planner.arrive("a", tokens(14), Scope())
    told.cached["a"] = 8
    planner.match("a", 0)
    planner.allocate("a", [1, 2, 3, 4], 8)
    planner.step([])
    assert not planner.finish("a", tokens(14), 8, [1, 2, 3, 4])
    assert not planner.step([]).stores


def test_a_request_whose_whole_load_failed_is_computed_and_not_loaded_again(planner: Planner, told: Told) -> None:
    planner.arrive("a", tokens(10), Scope())
    told.cached["a"] = 8
    assert planner.match("a", 0) == 8
    planner.allocate("a", [1, 2], 8)
    planner.step([])
    planner.fail({1, 2, 99})
    assert planner.match("a", 0) == 0
    assert [store_of(store) for store in run(planner, 10, [5, 6, 7])] == [("a", list(range(8)), [5, 6])]


def test_what_was_computed_again_after_a_failed_load_is_stored(planner: Planner, told: Told) -> None:
    for request_id, blocks in (("a", [1, 2]), ("b", [3, 4])):
        planner.arrive(request_id, tokens(10), Scope())
        told.cached[request_id] = 8
        planner.match(request_id, 0)
        planner.allocate(request_id, blocks, 8)
    planner.step([])
    planner.fail({2})
    stores = planner.step([Scheduled("a", 10, [1, 2, 8], True), Scheduled("b", 10, [3, 4, 9], True)]).stores
    assert [store.request_id for store in stores] == ["a"]


def test_a_request_that_ends_while_it_is_loaded_is_held_by_vllm_alone(planner: Planner, told: Told) -> None:
    """Two reports of one request would free its blocks twice."""
    planner.arrive("a", tokens(10), Scope())
    planner.match("a", 0)
    assert run(planner, 10, [1, 2, 3])
    planner.step([], ["a"])
    told.cached["a"] = 8
    assert planner.match("a", 0) == 8
    planner.allocate("a", [4, 5, 6], 8)
    assert not planner.finish("a", tokens(12), 8, [4, 5, 6])
    orders = planner.step([])
    assert (orders.held, orders.stores) == ([], [])


def test_a_request_that_ends_within_its_prompt_stores_nothing(planner: Planner) -> None:
    planner.arrive("a", tokens(14), Scope())
    planner.match("a", 0)
    run(planner, 8, [1, 2])
    assert not planner.finish("a", tokens(14), 8, [1, 2])
    assert not planner.step([]).stores


def test_a_preempted_request_is_told_and_stored_from_its_new_blocks(planner: Planner) -> None:
    planner.arrive("a", tokens(10), Scope())
    planner.match("a", 0)
    run(planner, 6, [1, 2])
    assert planner.step([], ["a", "stranger"]).preempted == ["a"]
    planner.match("a", 0)
    (store,) = run(planner, 10, [6, 7, 8])
    assert store_of(store) == ("a", list(range(8)), [6, 7])


def test_requests_that_never_arrived_pass_by(planner: Planner, told: Told) -> None:
    assert planner.match("a", 0) == 0
    planner.allocate("a", [1], 4)
    orders = planner.step([Scheduled("a", 10, [1, 2, 3], True)])
    assert (orders.loads, orders.stores) == ([], [])
    assert not planner.finish("a", tokens(20), 19, [1, 2, 3, 4])
    assert not told.asked


def test_an_ended_request_is_forgotten(planner: Planner, told: Told) -> None:
    planner.arrive("a", tokens(10), Scope())
    planner.finish("a", tokens(10), 0, [])
    assert told.forgotten == ["a"]
    assert planner.match("a", 0) == 0


def test_a_whole_table_takes_the_place_of_the_one_before(planner: Planner) -> None:
    planner.arrive("a", tokens(10), Scope())
    planner.match("a", 0)
    run(planner, 6, [1, 2])
    (store,) = run(planner, 10, [6, 7, 8])
    assert store.block_ids == [6, 7]
