"""`kvkeeper events`: publishes what a pool caches as vLLM's KV events over ZMQ, for routers that read those of vLLM.

A client of WatchEvents. While the service is away, or has no such pool yet, it waits and says so; what it published is cleared
then, as it is when this command ends. Subscribers hold up nothing: for one that does not read, messages are dropped, and it
asks for them again by their numbers.
"""

import argparse
import asyncio
import contextlib
import math
import signal
import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

import grpc

from kvkeeper.cache.v1 import cache_service_pb2 as pb
from kvkeeper.cli.console.addresses import add_cache_flag
from kvkeeper.cli.console.arguments import filled, utf8
from kvkeeper.cli.console.outcome import OPTIONS
from kvkeeper.cli.console.problems import EXIT_FAILED, complain, warn
from kvkeeper.client import AsyncCacheClient, AsyncCacheSession, KvkeeperError
from kvkeeper.client.new_sequence import root_name
from kvkeeper.common.service.extras import install_command, missing

if TYPE_CHECKING:
    from kvkeeper.cli.publishing.publication import Publication

_MOST_KEPT = 10_000  # batches for replay
_MOST_UNREAD = 100_000  # messages that wait for a subscriber
_END = (-1).to_bytes(8, "big", signed=True)  # vLLM's number for the end of a replay
_EXIT_TERMINATED = 143
_LINGER_MS = 1000  # for what has not left at the end
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 1.0
_NEVER_MENDED = {"UNAUTHENTICATED", "PERMISSION_DENIED", "INVALID_ARGUMENT", "UNIMPLEMENTED"}
Send = Callable[[tuple[int, bytes]], Awaitable[None]]


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Publishes what one pool has cached for one tenant, and every change of it, as vLLM's KVEventBatch over ZMQ, until"
        " Ctrl-C. Events carry the token ids of prompts, for all who reach the addresses."
    )
    for flag, metavar, default, text in (
        ("--zmq", "ADDRESS", None, "where it publishes, as tcp://127.0.0.1:5557"),
        ("--replay", "ADDRESS", "tcp://127.0.0.1:5558", "where batches are sent again (default: %(default)s)"),
        ("--topic", "TEXT", "", "topic of each message (default: an empty one)"),
        ("--model", "ID", "", "model of the pool, where there are pools of several"),
        ("--tenant", "NAME", "", "tenant whose blocks are published, with its name as cache_salt if no other is given"),
        ("--adapter", "DIGEST", "", "adapter whose blocks are published; by default those of the base model"),
        ("--lora", "NAME=PATH", "", "what routers call that adapter, as vLLM's --lora-modules has it"),
        ("--cache-salt", "TEXT", "", "salt of the prompts whose blocks are published"),
        ("--hash-seed", "TEXT", "vllm-none-hash", "PYTHONHASHSEED of the routers (default: vLLM's own)"),
    ):
        check = filled if metavar == "ADDRESS" else utf8
        parser.add_argument(flag, type=check, metavar=metavar, default=default, required=default is None, help=text)
    add_cache_flag(parser)


def run(args: argparse.Namespace) -> int:
    """Publishes until a signal. Raises KvkeeperError where trying again is no use."""
    text = f"the extra is not installed; install it with: {install_command('events')}"
    if not missing("zmq", "msgspec", "cbor2"):
        import zmq

        try:
            asyncio.run(_publish(args))
        except asyncio.CancelledError:
            return _EXIT_TERMINATED
        except zmq.ZMQError as error:
            text = f"cannot listen at {args.zmq} and {args.replay}: {error}"
    complain(text, reason="NOT_STARTED", is_json=False)
    return EXIT_FAILED


async def _publish(args: argparse.Namespace) -> None:
    import zmq.asyncio

    from kvkeeper.cli.publishing.publication import Publication

    publication, topic, publishing = Publication(_MOST_KEPT, time.time()), args.topic.encode(), asyncio.current_task()
    assert publishing is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, publishing.cancel)
    context = zmq.asyncio.Context()
    publisher, replays = context.socket(zmq.PUB), context.socket(zmq.ROUTER)
    try:
        publisher.sndhwm = _MOST_UNREAD
        replays.sndhwm = 4 * (_MOST_KEPT + 1)  # twice the longest replay, which is acknowledged by halves
        publisher.bind(args.zmq)
        replays.bind(args.replay)

        async def send(batch: tuple[int, bytes]) -> None:
            await publisher.send_multipart([topic, batch[0].to_bytes(8, "big"), batch[1]])

        serving = asyncio.create_task(_serve_replays(replays, publication, topic))
        try:
            await _follow(args, publication, send)
        finally:
            serving.cancel()
    finally:
        context.destroy(linger=_LINGER_MS)


async def _serve_replays(socket: Any, publication: "Publication", topic: bytes) -> None:
    """Sends the batches from the number on that a request has, then the end. A request that is none gets nothing."""
    while True:
        reader, *request = await socket.recv_multipart()
        if len(request) == 2 and len(request[1]) == len(_END):
            for number, batch in list(publication.replay(int.from_bytes(request[1], "big"))):
                await socket.send_multipart([reader, b"", topic, number.to_bytes(8, "big"), batch])
            await socket.send_multipart([reader, b"", b"", _END, b""])


async def _follow(args: argparse.Namespace, publication: "Publication", send: Send) -> None:
    """Watches, and begins anew whenever the watch ends."""
    pause = _FIRST_PAUSE_S
    await send(publication.begin())
    while True:
        waits_for = "a pool"
        try:
            async with AsyncCacheClient(args.cache, OPTIONS) as client:
                if (spec := await _find_spec(client, args.model)) is not None:
                    async with await client.open_session(spec, client_name="events") as session:
                        warn(f"publishing the blocks of {spec.model_id} at {args.zmq}", is_json=False)
                        pause = _FIRST_PAUSE_S
                        await _watch(session, args, publication, send)
        except KvkeeperError as error:
            if error.code.name in _NEVER_MENDED:
                raise
            waits_for = f"the service: {error.message or error.reason or error.code.name}"
        if pause == _FIRST_PAUSE_S:
            warn(f"waiting for {waits_for}", is_json=False)
        await asyncio.sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE_S)


async def _find_spec(client: AsyncCacheClient, model: str) -> pb.KvSpec | None:
    """That of the pool. Pools of one model, of the ranks of an engine, have the same blocks."""
    specs = [pool.spec for pool in (await client.capabilities()).pools if model in ("", pool.spec.model_id)]
    if len({spec.model_id for spec in specs}) > 1:
        raise KvkeeperError(grpc.StatusCode.INVALID_ARGUMENT, message="there are pools of several models; name one by --model")
    return specs[0] if specs else None


async def _watch(session: AsyncCacheSession, args: argparse.Namespace, publication: "Publication", send: Send) -> None:
    """Publishes what the watch reports, and when it ends that all is cleared."""
    spec, salt = session.pool.spec, args.cache_salt
    first_parent = root_name(spec, args.tenant, args.adapter, salt)
    names = {"salt": salt or args.tenant, "seed": args.hash_seed, "lora": args.lora}
    await send(publication.begin(first_parent, spec.block_size, **names))
    scope = {"adapter": args.adapter, "cache_salt": salt}
    stream = session.watch_events(args.tenant, timeout_s=math.inf, include_token_ids=True, **scope)
    renewing = asyncio.create_task(_renew(session, stream.cancel))
    try:
        async for message in stream:
            if batch := publication.publish(message):
                await send(batch)
    finally:
        renewing.cancel()
        stream.cancel()
        await send(publication.begin())


async def _renew(session: AsyncCacheSession, end: Callable[[], None]) -> None:
    with contextlib.suppress(KvkeeperError):
        while True:
            await asyncio.sleep(session.ttl_ms / 3000)
            await session.renew()
    end()
