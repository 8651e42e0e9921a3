"""`kvkeeper events`: the names that vLLM gives blocks, the form of its events, replays, and the command itself."""

import asyncio
import contextlib
import signal
import sys
from collections.abc import AsyncIterator, Callable
from itertools import chain
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import zmq
import zmq.asyncio

from kvkeeper.cache.v1 import cache_service_pb2 as pb
from kvkeeper.cache_service.config import CacheConfig
from kvkeeper.cache_service.server import RunningServer, start_server
from kvkeeper.cli import main
from kvkeeper.cli.publishing.kv_events import number, sha256_cbor
from kvkeeper.cli.publishing.publication import Batch, Publication
from kvkeeper.client import AsyncCacheClient
from tests.support.processes.services import environment

ROOT_NAME = b"what first blocks are behind"
SEED = "vllm-none-hash"
# What vLLM's hash_block_tokens makes with sha256_cbor, over three blocks one behind the other, and of a block with a salt.
NONE_HASH = "9bd96a485ad84efdafb72ee48a1d7a69bcead0f8f0433173941b276b9581eef0"
TOKENS = ([1, 2, 3, 4], [24, 255, 256, 65535], [65536, 2147483647, 0, 23])
HASHES = (
    "58d0879dff3800f65f8c5fd449d73048c0f7699dd238a03b84b146b151d55111",
    "53805941baffedb44fb6529d6a945fa8d9dcdf0775575a84044816d64ca12bcb",
    "3240f928ea74897752e79712750ae454939fea506866d659d45dfe37784873de",
)
NUMBERS = [9561501211280363793, 308521684139322315, 15302666623069483998]  # as its maybe_convert_block_hash makes them
SALTED = "0e172de9010f20a975885630390148d0769af6bbe75a732d3b66b62598433cae"
DEADLINE_S = 60


def message(kind: int, *names: bytes, tier: int = 0, parents: Any = (), tokens: Any = ()) -> pb.WatchEventsResponse:
    token_ids = np.array(tokens, "<i4").tobytes()
    return pb.WatchEventsResponse(kind=kind, block_names=names, parent_names=parents, tier=tier, token_ids=token_ids)  # type: ignore[arg-type]


def stored(tier: int = 0) -> pb.WatchEventsResponse:
    """Three blocks one behind the other."""
    return message(pb.EVENT_KIND_STORED, b"a", b"b", b"c", tier=tier, parents=(ROOT_NAME, b"a", b"b"), tokens=TOKENS)


def events(batch: Batch | None) -> list[Any]:
    """Of a batch, as they are on the wire."""
    assert batch is not None
    time, found, rank = msgspec.msgpack.decode(batch[1])
    assert (type(time), rank) == (float, 0)
    return list(found)


def begun(most_kept: int = 100, **names: str) -> Publication:
    publication = Publication(most_kept, 1e9)
    assert publication.begin(ROOT_NAME, 4, **{"salt": "", "seed": SEED, **names})[0] == 10**15
    return publication


def test_blocks_are_named_as_vllm_names_them() -> None:
    last = sha256_cbor(SEED)
    assert last.hex() == NONE_HASH
    for tokens, expected, part in zip(TOKENS, HASHES, NUMBERS, strict=True):
        last = sha256_cbor((last, tokens, None))
        assert (last.hex(), number(last)) == (expected, part)
    assert sha256_cbor((sha256_cbor(SEED), [1, 2, 3, 4], (("cache_salt", "tenant-a"),))).hex() == SALTED


def test_events_have_the_form_of_vllms() -> None:
    publication = begun()
    first = {
        "type": "BlockStored", "block_hashes": NUMBERS, "parent_block_hash": None, "token_ids": [*chain(*TOKENS)],
        "block_size": 4, "lora_id": None, "medium": "GPU", "lora_name": None,
    }  # fmt: skip
    assert events(publication.publish(stored())) == [first]
    moved = events(publication.publish(message(pb.EVENT_KIND_TIER_CHANGED, b"c", tier=pb.TIER_DISK)))
    on_disk = {"block_hashes": NUMBERS[2:], "parent_block_hash": NUMBERS[1], "token_ids": TOKENS[2]}
    assert moved == [
        {"type": "BlockRemoved", "block_hashes": NUMBERS[2:], "medium": "GPU"},
        {**first, **on_disk, "medium": "STORAGE", "locality": "LOCAL"},
    ]
    (remote,) = events(publication.publish(message(pb.EVENT_KIND_TIER_CHANGED, b"c", tier=pb.TIER_REMOTE)))[1:]
    assert (remote["medium"], remote["locality"]) == ("STORAGE", "REMOTE")
    (_, host) = events(publication.publish(message(pb.EVENT_KIND_TIER_CHANGED, b"b", tier=pb.TIER_HOST)))
    assert (host["medium"], "locality" in host) == ("CPU", False)
    assert events(publication.publish(message(pb.EVENT_KIND_REMOVED, b"c", b"b"))) == [
        {"type": "BlockRemoved", "block_hashes": NUMBERS[2:], "medium": "STORAGE", "locality": "REMOTE"},
        {"type": "BlockRemoved", "block_hashes": NUMBERS[1:2], "medium": "CPU"},
    ]
    assert events(publication.begin()) == [{"type": "AllBlocksCleared"}]


def test_blocks_that_are_not_one_behind_the_other_are_told_apart() -> None:
    fork = message(
        pb.EVENT_KIND_SNAPSHOT, b"a", b"b", b"x", tier=pb.TIER_HOST, parents=(ROOT_NAME, b"a", b"a"), tokens=TOKENS
    )  # fmt: skip
    one, other = events(begun().publish(fork))
    assert (one["block_hashes"], other["parent_block_hash"]) == (NUMBERS[:2], NUMBERS[0])
    assert (other["token_ids"], other["medium"]) == (TOKENS[2], "CPU")


def test_what_says_nothing_of_blocks_is_no_batch() -> None:
    publication = begun()
    publication.publish(stored())
    for kind in (pb.EVENT_KIND_PRESSURE, pb.EVENT_KIND_SNAPSHOT_END, pb.EVENT_KIND_POOL_REPLACED):
        assert publication.publish(message(kind)) is None
    assert publication.publish(message(pb.EVENT_KIND_TIER_CHANGED, b"a", tier=pb.TIER_DEVICE)) is None  # where it was


def test_a_tenants_name_is_the_salt_of_first_blocks() -> None:
    (event,) = events(begun(salt="tenant-a").publish(stored()))
    assert event["extra_keys"] == [["tenant-a"], None, None]
    assert event["block_hashes"][0] == number(bytes.fromhex(SALTED)) != NUMBERS[0]
    (other,) = events(begun(seed="7").publish(stored()))
    assert not set(other["block_hashes"]) & {*NUMBERS, *event["block_hashes"]}


def test_numbers_go_on_and_a_replay_begins_where_it_is_asked_to() -> None:
    publication = begun()
    batches = [publication.publish(stored()), publication.publish(message(pb.EVENT_KIND_REMOVED, b"c")), publication.begin()]
    assert [batch and batch[0] for batch in batches] == [10**15 + 1, 10**15 + 2, 10**15 + 3]
    for first in range(4):
        assert list(publication.replay(10**15 + first))[-3:] == batches[max(first - 1, 0) :]
    assert list(publication.replay(2**64 - 1)) == []


@pytest.mark.parametrize(("first_number", "num_pieces"), [(0, 3), (10**15 + 1, 3), (10**15 + 2, 2), (10**15 + 3, 1)])
def test_a_replay_of_what_is_not_kept_any_more_tells_what_was_left_of_it(first_number: int, num_pieces: int) -> None:
    publication, count = begun(most_kept=3), 1300
    names = [at.to_bytes(4, "big") for at in range(count)]
    parents = [ROOT_NAME, *names[:-1]]
    publication.publish(message(pb.EVENT_KIND_STORED, *names, parents=parents, tokens=np.arange(4 * count)))
    publication.publish(message(pb.EVENT_KIND_TIER_CHANGED, names[0], tier=pb.TIER_HOST))
    for name in reversed(names[-4:]):  # of these, one is forgotten
        publication.publish(message(pb.EVENT_KIND_REMOVED, name))
    replayed = list(publication.replay(first_number))
    assert [batch[0] for batch in replayed] == list(range(10**15 + 4 - num_pieces, 10**15 + 7))
    earlier = [event for batch in replayed[:-3] for event in events(batch)]
    assert earlier[0] == {"type": "AllBlocksCleared"}
    told = [block for event in earlier[1:] for block in event["block_hashes"]]
    assert len(told) == len(set(told)) == count - 1
    assert [event["medium"] for event in earlier[1:3]] == ["CPU", "GPU"]
    assert [event["type"] for batch in replayed[-3:] for event in events(batch)] == ["BlockRemoved"] * 3


class Subscriber:
    """A router: it subscribes, and asks for what it missed."""

    def __init__(self, folder: Path) -> None:
        self.context = zmq.asyncio.Context()
        self.live, self.asking = self.context.socket(zmq.SUB), self.context.socket(zmq.DEALER)
        self.live.connect(f"ipc://{folder}/zmq")
        self.live.subscribe(b"kv@")
        self.asking.connect(f"ipc://{folder}/replay")
        self.last = -1
        self.replayed: dict[int, bytes] = {}
        self.blocks: set[int] = set()
        self.num_cleared = 0

    async def catch_up(self) -> None:
        await self.asking.send_multipart([b"", b"not a number"])  # is passed over
        await self.asking.send_multipart([b"", (self.last + 1).to_bytes(8, "big")])
        while True:
            empty, topic, batch_number, batch = await self.asking.recv_multipart()
            assert empty == b""
            if batch_number == b"\xff" * 8:
                assert (topic, batch) == (b"", b"")
                return
            assert topic == b"kv@node"
            self.apply(int.from_bytes(batch_number, "big"), batch)

    def apply(self, batch_number: int, batch: bytes) -> None:
        assert batch_number > self.last
        self.last, self.replayed[batch_number] = batch_number, batch
        for event in events((batch_number, batch)):
            self.blocks |= {*event["block_hashes"]} if event["type"] == "BlockStored" else set()
            self.blocks -= {*event["block_hashes"]} if event["type"] == "BlockRemoved" else set()
            if event["type"] == "AllBlocksCleared":
                self.blocks, self.num_cleared = set(), self.num_cleared + 1

    async def until(self, holds: Callable[[], bool]) -> None:
        async with asyncio.timeout(DEADLINE_S):
            while not holds():
                await self.catch_up()


@contextlib.asynccontextmanager
async def publishing(folder: Path, *flags: str) -> AsyncIterator[asyncio.subprocess.Process]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "kvkeeper.cli", "events", "--cache", f"unix:{folder}/s", "--zmq", f"ipc://{folder}/zmq",
        "--replay", f"ipc://{folder}/replay", "--topic", "kv@node", *flags,
        env=environment(folder), stdin=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


async def served(folder: Path) -> RunningServer:
    return await start_server(CacheConfig(listen=f"unix:{folder}/s", runtime_dir=folder, pool_memory=1 << 20, drain_timeout=0))


async def test_a_subscriber_has_what_is_cached_whichever_side_is_restarted(folder: Path, spec: pb.KvSpec) -> None:
    subscriber = Subscriber(folder)
    async with publishing(folder) as process:  # before there is a service
        await subscriber.until(lambda: subscriber.num_cleared > 0)
        server = await served(folder)
        async with AsyncCacheClient(f"unix:{folder}/s") as client, await client.open_session(spec) as session:
            await store(session, 1, TOKENS[0])
            await subscriber.until(lambda: subscriber.blocks == {NUMBERS[0]})
            topic, batch_number, batch = await heard(subscriber, session)
            await subscriber.catch_up()
            assert (topic, batch) == (b"kv@node", subscriber.replayed[int.from_bytes(batch_number, "big")])
            await session.evict_blocks(num_free_blocks=session.pool.num_blocks - 1)
            await subscriber.until(lambda: not subscriber.blocks)
            await store(session, 1000, TOKENS[0])
            await subscriber.until(lambda: bool(subscriber.blocks))
        seen = subscriber.num_cleared
        await server.stop()
        await subscriber.until(lambda: subscriber.num_cleared > seen and not subscriber.blocks)
        server = await served(folder)
        async with AsyncCacheClient(f"unix:{folder}/s") as client, await client.open_session(spec) as session:
            await store(session, 1, TOKENS[1])
            await subscriber.until(lambda: bool(subscriber.blocks))
            process.kill()
            await process.wait()
            async with publishing(folder) as next_process:  # its numbers go on
                seen = subscriber.num_cleared
                await store(session, 2, TOKENS[0])
                await subscriber.until(lambda: len(subscriber.blocks) == 2 and subscriber.num_cleared > seen)
                await heard(subscriber, session)
                next_process.send_signal(signal.SIGTERM)
                assert await next_process.wait() == 143
                while await subscriber.live.poll(1000):
                    _, _, batch = await subscriber.live.recv_multipart()
                assert events((0, batch)) == [{"type": "AllBlocksCleared"}]
    await server.stop()
    subscriber.context.destroy(linger=0)


async def heard(subscriber: Subscriber, session: Any) -> list[bytes]:
    """The frames of a batch that was published now. A subscription takes a while to be known to the publisher."""
    async with asyncio.timeout(DEADLINE_S):
        for at in range(5000, 9000):
            await store(session, at, [at, subscriber.num_cleared, 0, 0])
            if await subscriber.live.poll(50):
                frames: list[bytes] = await subscriber.live.recv_multipart()
                if int.from_bytes(frames[1], "big") > subscriber.last:
                    return frames
    raise AssertionError("nothing was heard")


async def store(session: Any, sequence_id: int, tokens: list[int]) -> None:
    await session.create_sequence(sequence_id, tokens)
    await session.extend(sequence_id, len(tokens))
    await session.commit(sequence_id, len(tokens))
    await session.release(sequence_id)


async def test_of_pools_of_several_models_one_is_named(folder: Path, spec: pb.KvSpec) -> None:
    server, other = await served(folder), pb.KvSpec()
    other.CopyFrom(spec)
    other.model_id = "other"
    async with AsyncCacheClient(f"unix:{folder}/s") as client:
        async with await client.open_session(spec) as session, await client.open_session(other):
            await store(session, 1, TOKENS[0])
            async with publishing(folder) as process:
                _, said = await asyncio.wait_for(process.communicate(), DEADLINE_S)
            assert (process.returncode, "name one by --model" in said.decode()) == (1, True)
            subscriber = Subscriber(folder)
            async with publishing(folder, "--model", "tiny"):
                await subscriber.until(lambda: subscriber.blocks == {NUMBERS[0]})
            subscriber.context.destroy(linger=0)
    await server.stop()


def test_an_address_that_is_taken_ends_the_command(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with zmq.Context() as context, context.socket(zmq.PUB) as taken:
        taken.bind("tcp://127.0.0.1:0")
        address = taken.last_endpoint.decode()
        assert main(["events", "--zmq", address, "--replay", f"ipc://{folder}/replay"]) == 1
    assert capsys.readouterr().err.startswith(
        f"kvkeeper: cannot listen at {address} and ipc://{folder}/replay: Address already"
    )


def test_without_the_extra_it_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("kvkeeper.cli.publishing.events.missing", lambda *modules: list(modules))
    assert main(["events", "--zmq", "tcp://127.0.0.1:1"]) == 1
    assert "install -e" in capsys.readouterr().err


# What vLLM 0.32 makes of two blocks of a request with lora_name "sql" from /adapters/sql, and cache_salt "salt".
WITH_ADAPTER = (
    "0a4f79bde6bcfda2cfe68bb50a0b1876033cfcf766a3d25b6805e4d4c5715179",
    "2c576be40d5f604a319122528eb7480ad4576717b68d2028cde04c5c91f838ef",
)


def test_an_adapter_is_in_each_block_and_a_salt_in_the_first() -> None:
    publication = begun(salt="salt", lora="sql=/adapters/sql")
    two = message(pb.EVENT_KIND_STORED, b"a", b"b", parents=(ROOT_NAME, b"a"), tokens=TOKENS[:2])
    (event,) = events(publication.publish(two))
    assert event["block_hashes"] == [number(bytes.fromhex(each)) for each in WITH_ADAPTER]
    assert (event["lora_name"], event["lora_id"]) == ("sql", None)
    assert event["extra_keys"] == [["sql", "salt"], ["sql"]]
    (event,) = events(begun(lora="sql=/adapters/sql").publish(two))
    assert event["extra_keys"] == [["sql"], ["sql"]]
