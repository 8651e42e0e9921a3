"""What clients are told of blocks that lie on the disk alone: events, matches by tier, and both after a restart."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from kvkeeper.cache.v1 import cache_service_pb2 as pb
from tests.api.test_watch_events import Reader, names_of, watching
from tests.support.worlds.cache_api import BLOCK_SIZE, Api, Session, serving
from tests.support.worlds.memory_folder import memory_folder

NUM_PROMPTS, NUM_BLOCKS = 12, 4  # of a prompt: far more than device and host have room for
SIZES: dict[str, Any] = {"num_blocks": 9, "num_host_blocks": 9, "disk_memory": 1 << 20, "num_pools": 1}
TENANT = "who asks"


def prompt(number: int) -> list[int]:
    return list(range(100 * number, 100 * number + NUM_BLOCKS * BLOCK_SIZE))


async def store_all(api: Api, session: Session) -> None:
    """Each prompt is computed, and evicted once the disk has what was evicted before."""
    for number in range(NUM_PROMPTS):
        await session.compute(number + 1, NUM_BLOCKS * BLOCK_SIZE, first=100 * number, tenant=TENANT)
        await session.call("ReleaseSequence", sequence_id=number + 1)
        await session.call("EvictBlocks", num_free_blocks=8)
        num_stored = NUM_BLOCKS * (number + 1)
        await api.until(lambda stats, num_stored=num_stored: stats.pools[0].num_disk_stored_blocks >= num_stored)


async def mirror(reader: Reader, session: Session, wanted: dict[int, int]) -> dict[int, int]:
    """Reads on until as many blocks are in each tier as is wanted, or until the time is over; then what is in each."""
    tiers: dict[bytes, int] = {}
    while Counter(tiers.values()) != wanted:
        event = await reader.next()
        if event.kind in (pb.EVENT_KIND_SNAPSHOT, pb.EVENT_KIND_STORED, pb.EVENT_KIND_TIER_CHANGED):
            tiers.update(dict.fromkeys(event.block_names, event.tier or pb.TIER_DEVICE))
        elif event.kind == pb.EVENT_KIND_REMOVED:
            raise AssertionError(f"{len(event.block_names)} blocks that the disk has are told as removed")
    assert set(tiers) == {name for number in range(NUM_PROMPTS) for name in names_of(session, prompt(number), TENANT)}
    return dict(Counter(tiers.values()))


async def check_matches(session: Session, tiers: dict[int, int]) -> None:
    """All of each prompt is cached, in the tiers that the events told of."""
    sums: Counter[int] = Counter()
    for number in range(NUM_PROMPTS):
        found = await session.call("MatchPrefix", token_ids=[*prompt(number), 7], tenant=TENANT)
        shown = await session.call("ExplainMatch", token_ids=[*prompt(number), 7], tenant=TENANT)
        assert found.num_matched_tokens == shown.num_matched_tokens == NUM_BLOCKS * BLOCK_SIZE
        assert (found.num_host_tokens, found.num_disk_tokens) == (shown.num_host_tokens, shown.num_disk_tokens)
        assert not found.num_remote_tokens
        assert not found.remote_not_asked
        assert shown.end == (pb.MATCH_END_ON_DISK if found.num_disk_tokens else pb.MATCH_END_PARTIAL_BLOCK)
        assert not found.num_disk_tokens or f"{found.num_disk_tokens} of them on the disk" in shown.explanation
        sums[pb.TIER_HOST] += found.num_host_tokens // BLOCK_SIZE
        sums[pb.TIER_DISK] += found.num_disk_tokens // BLOCK_SIZE
    assert +sums == tiers
    others = await session.call("MatchPrefix", token_ids=prompt(0), tenant="another")
    assert (others.num_matched_tokens, others.num_disk_tokens) == (0, 0)


async def test_no_block_that_the_disk_has_is_told_as_removed(tmp_path: Path) -> None:
    async with serving(**SIZES, disk_path=tmp_path / "disk") as api:
        session = await api.open(engine=False)
        async with watching(session, TENANT) as reader:
            await store_all(api, session)
            tiers = await mirror(reader, session, {pb.TIER_HOST: 8, pb.TIER_DISK: NUM_PROMPTS * NUM_BLOCKS - 8})
        await check_matches(session, tiers)
        await api.audit()


async def test_a_hint_brings_what_the_disk_has_to_the_host_tier(tmp_path: Path) -> None:
    async with serving(**SIZES, disk_path=tmp_path / "disk") as api:
        await store_all(api, await api.open(engine=False))
    async with serving(**SIZES, disk_path=tmp_path / "disk") as api:  # which has not met the tenant
        session = await api.open(engine=False)
        wanted, other = (pb.PrefixHint(token_ids=prompt(number), tenant=TENANT, prefetch=number == 3) for number in (3, 4))
        of_another = pb.PrefixHint(token_ids=prompt(5), tenant="another", prefetch=True)
        assert list((await session.call("HintPrefix", hints=[wanted, other, of_another])).num_hinted_tokens) == [0, 0, 0]
        await api.until(lambda stats: stats.pools[0].num_disk_hit_blocks >= NUM_BLOCKS)
        for number, num_host in ((3, NUM_BLOCKS), (4, 0), (5, 0)):
            found = await session.call("MatchPrefix", token_ids=prompt(number), tenant=TENANT)
            assert (found.num_host_tokens, found.num_matched_tokens) == (num_host * BLOCK_SIZE, NUM_BLOCKS * BLOCK_SIZE)
        await api.audit()


@pytest.mark.parametrize("is_kept", [False, True], ids=["the disk alone", "with --memory-dir"])
async def test_a_restarted_service_tells_what_the_disk_has_before_the_tenant_is_met(tmp_path: Path, *, is_kept: bool) -> None:
    with memory_folder() as folder:
        settings = SIZES | {"disk_path": tmp_path / "disk"} | ({"memory_dir": folder, "keep": True} if is_kept else {})
        async with serving(**settings) as api:
            await store_all(api, await api.open(engine=False))
        num_hosts = 8 if is_kept else 0
        async with serving(**settings) as api:
            session = await api.open(engine=False)
            wanted = {pb.TIER_HOST: num_hosts} if is_kept else {}
            await check_matches(session, wanted | {pb.TIER_DISK: NUM_PROMPTS * NUM_BLOCKS - num_hosts})
            async with watching(session, TENANT) as reader:
                await mirror(reader, session, wanted | {pb.TIER_DISK: NUM_PROMPTS * NUM_BLOCKS - num_hosts})
            async with watching(session, "another") as reader:
                assert await reader.snapshot() == set()
            await session.call("ClearPrefixCache")
            async with watching(session, TENANT) as reader:
                assert await reader.snapshot() == set()
            await api.audit()
