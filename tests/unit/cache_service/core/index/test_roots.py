"""Roots of scopes: each its own, none lost while it is needed, and never used up."""

import pytest

from kvkeeper.cache_service.core.index import roots as roots_module
from kvkeeper.cache_service.core.index.events.event_feed import EventFeed
from kvkeeper.cache_service.core.tiers.lookup import ContentNames
from kvkeeper.cache_service.core.values.scopes import get_tenant, make_scope
from kvkeeper.cache_service.core.values.types import MatchEnd, PressureLevel
from tests.support.worlds.core_pool import A, CorePool
from tests.support.worlds.engine_model import int32
from tests.support.worlds.scopes import ADAPTER, NAMES

PROMPT = [*range(9)]


def test_scopes_are_told_apart_and_know_their_tenant() -> None:
    assert len(NAMES) == 4
    for scope, (tenant, _, salt) in NAMES.items():
        assert get_tenant(scope) == tenant
        assert not salt or salt not in scope
    longest = "t" * 64
    hostile = [longest, "t", "", "\0" * 64, f"\0{ADAPTER}"[:64], "-" * 64]
    parts = [(tenant, adapter, salt) for tenant in hostile for adapter in ("", ADAPTER) for salt in ("", "-", ADAPTER)]
    assert len({make_scope(*part) for part in parts}) == len(parts)
    assert [get_tenant(make_scope(*part)) for part in parts] == [tenant for tenant, _, _ in parts]


def test_fifty_thousand_salts_in_turn_take_few_roots() -> None:
    pool = CorePool(num_blocks=9)
    roots = pool.manager.state.index.roots
    for number in range(50_000):
        scope = make_scope("", "", str(number))
        root = pool.manager.state.index.root(scope)
        assert roots.scope(root) == scope and roots.find(scope) == root
    assert len(roots.scopes) <= 2
    assert roots.find(make_scope("", "", "0")) == 0, "its number was given away"
    assert list(roots.tenants) == [""]


def test_what_is_cached_keeps_its_root_and_the_roots_stay_few() -> None:
    pool = CorePool(num_blocks=9, block_size=4)
    roots = pool.manager.state.index.roots
    for number in range(300):
        pool.cache([*range(9)], salt=f"salt {number}")
        held = [salt for salt in range(number + 1) if pool.matched(PROMPT, salt=f"salt {salt}")]
        assert held == [*range(max(0, number - 3), number + 1)], "as many as the pool has room for, two blocks each"
    assert len(roots.scopes) <= 10


def test_a_waiting_sequence_keeps_its_root() -> None:
    pool = CorePool(num_blocks=9)
    pool.create(1, PROMPT, salt="waits")
    root = pool.manager.state.index.find_root(make_scope("", "", "waits"))
    for number in range(20):
        pool.create(2, PROMPT, salt=str(number))
        pool.release(2)
    pool.step(starts=[(1, 9, 9)])
    pool.step(commits=[(1, 9, [])])
    pool.release(1)
    assert pool.manager.state.index.find_root(make_scope("", "", "waits")) == root
    assert len(pool.matched(PROMPT, salt="waits")) == 2
    assert not any(pool.matched(PROMPT, salt=str(number)) for number in range(20))


def test_no_root_changes_its_scope_while_changes_of_it_are_unread() -> None:
    """A watch of one salt would be told the blocks of another."""
    pool = CorePool(num_blocks=9)
    state = pool.manager.state
    feed = EventFeed(state.index, b"spec", PressureLevel.LOW, lambda: None)
    old, new = make_scope("", "", "old"), make_scope("", "", "new")
    ours, theirs = feed.open(old), feed.open(new)
    while feed.advance(100):
        pass
    pool.cache(PROMPT, salt="old")
    pool.manager.prefixes.clear()
    root = state.index.find_root(old)
    assert state.index.root(new) != root, "what is stored and removed below it is unread"
    while feed.advance(100):
        pass
    for number in range(4):
        state.index.root(make_scope("", "", f"other {number}"))
    assert not state.index.find_root(old), "with all of it read, the number was given away"
    pool.cache([*range(20, 29)], salt="new")
    while feed.advance(100):
        pass
    told = {watch: [name for event in iter(watch.take_event, None) for name in event.names] for watch in (ours, theirs)}
    assert (len(set(told[ours])), len(set(told[theirs]))) == (2, 2)
    assert not set(told[ours]) & set(told[theirs])


def test_tenants_are_bounded_and_scopes_of_one_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roots_module, "MAX_TENANTS", 2)
    pool = CorePool()
    for number in range(500):
        pool.create(1, [1], tenant="ab"[number % 2], adapter=f"{number:064x}")
        pool.release(1)
    assert not pool.manager.state.index.roots.has_room_for(make_scope("c", ADAPTER))
    assert pool.manager.queries.stats().num_tenants == 2
    assert pool.manager.queries.list_sequence_ids(A, "a").tolist() == []


def test_quotas_and_clearing_are_by_tenant_over_its_adapters() -> None:
    pool = CorePool(num_blocks=17, block_size=4, tenant_quota=0.25)
    for number in range(6):
        pool.cache([*range(9)], tenant="a", adapter=f"{number:064x}")
    while pool.manager.maintenance.do_due_work():
        pass
    cached = sum(len(pool.matched(PROMPT, "a", f"{number:064x}")) for number in range(6))
    assert cached == 4, "of all adapters together"
    assert pool.manager.queries.stats().num_cleared_blocks == 0
    pool.cache([*range(50)], tenant="b")
    assert pool.manager.queries.stats().num_cleared_blocks > 0


def test_names_follow_the_scope_of_a_root_that_was_given_away() -> None:
    """Names of blocks, and of content in a disk or a store: under a name of before another salt's content would be found."""
    pool = CorePool(num_blocks=9)
    state = pool.manager.state
    names = [state.block_names, ContentNames(state.index, b"key")]
    first = state.index.root(make_scope("", "", "first"))
    of_first = [each.of(first) for each in names]
    assert state.index.root(make_scope("", "", "second")) == first
    assert all(each.of(first) not in of_first for each in names)
    assert [each.first(make_scope("", "", "first")) for each in names] == of_first


def test_an_explanation_says_nothing_of_a_scope_that_had_the_root_before() -> None:
    pool = CorePool(num_blocks=9)
    pool.cache(PROMPT, salt="first")
    pool.manager.prefixes.clear()
    first, second = (make_scope("", "", salt) for salt in ("first", "second"))
    explain = pool.manager.queries.explain_match
    assert explain(first, int32(PROMPT)).end is MatchEnd.CLEARED
    root = pool.manager.state.index.find_root(first)
    assert pool.manager.state.index.root(second) == root
    assert explain(second, int32(PROMPT)).end is MatchEnd.NEVER_STORED
    assert pool.manager.state.index.root(first) == root
    assert explain(first, int32(PROMPT)).end is MatchEnd.CLEARED, "it is known again"


def test_what_a_fork_wrote_is_cleared_for_another_tenant() -> None:
    pool = CorePool(num_blocks=4, block_size=4)
    pool.prefill(1, range(5), tenant="a", adapter=ADAPTER)
    pool.step(forks=[(1, 2, 5)], releases=[1])
    pool.step(reserves=[(2, 9, 9)])
    assert len(pool.table(2)) == 3
    pool.release(2)
    pool.manager.prefixes.clear()
    pool.prefill(3, range(12), tenant="b")
    assert pool.manager.queries.stats().num_cleared_blocks == 3
