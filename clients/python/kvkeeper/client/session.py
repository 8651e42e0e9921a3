"""One session of the cache service for asyncio: its lease, its memory, its steps, and its sequences one call at a time.

An engine drives a session with create_sequence, step, renew and close; extend, commit, fork, truncate, release, write_kv and
read_kv are the same operations one at a time, for a session that does not step. Every call raises KvkeeperError.
"""

import contextlib
import socket
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import grpc
import numpy as np
import numpy.typing as npt

from kvkeeper.cache.v1 import cache_service_pb2 as pb
from kvkeeper.client import kv_chunks
from kvkeeper.client.arena import Arena, attach_arena, attach_arena_and_lane
from kvkeeper.client.errors import KvkeeperError, parse_error
from kvkeeper.client.kv_chunks import KvTokens
from kvkeeper.client.new_sequence import Created, NewSequence, TokenIds, to_list
from kvkeeper.client.retry import SLICED_TIMEOUT_S
from kvkeeper.client.step_carriers import StepCarriers
from kvkeeper.client.step_lane import attach_lane
from kvkeeper.client.steps import StepItems, StepResult, decode, encode
from kvkeeper.client.transport import AsyncStream, AsyncTransport

Logits = npt.NDArray[np.float32]
WATCH_TIMEOUT_S = 86_400.0  # a watch lasts as long as its session, but every call has a deadline


class AsyncCacheSession:
    """A lease on a pool. Every step renews it; in between, the client calls renew()."""

    def __init__(self, transport: AsyncTransport, opened: pb.OpenSessionResponse) -> None:
        self.session_id: str = opened.session_id
        self.epoch: int = opened.epoch
        self.pool: pb.PoolInfo = opened.pool
        self.ttl_ms: int = opened.ttl_ms
        self.step_id = 0  # of the last step that was applied
        self._transport = transport
        self._opened = opened
        self._head: dict[str, Any] = {"session_id": opened.session_id, "epoch": opened.epoch}  # of every request
        self._steps = StepCarriers(transport)

    async def __aenter__(self) -> "AsyncCacheSession":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    @property
    def has_step_lane(self) -> bool:
        """Whether steps go over a socket of this host beside gRPC."""
        return self._steps.has_lane

    @property
    def attach_point(self) -> tuple[str, str]:
        """Path and token of the attach socket, for the processes of other ranks: see arena.attach_arena."""
        return self._opened.attach_socket_path, self._opened.attach_token

    async def attach(self, *, step_lane: bool = True) -> Arena:
        """Map the pool's memory; once per session, before its first step.

        step_lane: also have a socket for steps, where the service offers one.
        """
        opened, pool, timeout_s = self._opened, self.pool, self._transport.options.timeout_s
        arguments = opened.attach_socket_path, opened.attach_token, pool.arena_bytes, timeout_s, pool.host_arena_bytes
        in_thread = self._transport.backend.in_thread
        if not (step_lane and opened.offers_step_lane):
            return await in_thread(lambda: attach_arena(*arguments), Arena.close)
        arena, lane = await in_thread(lambda: attach_arena_and_lane(*arguments), _close_both)
        self._use_lane(lane)
        return arena

    async def attach_step_lane(self) -> bool:
        """Have a socket for steps without mapping the memory, instead of attach(). Whether there is one now.

        There is none where the service is on another host, or does not trust this process; steps then go over gRPC.
        """
        opened, timeout_s = self._opened, self._transport.options.timeout_s
        if opened.offers_step_lane:
            attach = partial(attach_lane, opened.attach_socket_path, opened.attach_token, timeout_s)
            with contextlib.suppress(KvkeeperError):
                self._use_lane(await self._transport.backend.in_thread(attach, _close_lane))
        return self.has_step_lane

    def _use_lane(self, lane: socket.socket | None) -> None:
        if lane is not None:
            self._steps.lane = self._transport.backend.lane(lane, self._transport.options.timeout_s)

    async def step(self, items: StepItems, completed_step_id: int | None = None, traceparent: str = "") -> StepResult:
        """Apply one iteration. completed_step_id None says that the device work of all earlier steps is done.

        After a broken stream the same bytes are sent again, which the service applies exactly once. After a failure the step
        id is not used up; after a cancellation or a deadline it is not known whether the step was applied.
        """
        step_id = self.step_id + 1
        completed = self.step_id if completed_step_id is None else completed_step_id
        request = encode(items, self.session_id, self.epoch, step_id, completed, traceparent)
        answer = decode(await self._steps.exchange(request))
        self.step_id = step_id
        return answer

    async def renew(
        self, completed_step_id: int = 0, completed_transfers: Sequence[int] = (), failed_transfers: Sequence[int] = ()
    ) -> pb.RenewSessionResponse:
        """Renew the lease; completed_step_id 0 reports nothing. Transfer orders may be reported, too, by their ids."""
        return await self._call(
            "RenewSession",
            completed_step_id=completed_step_id,
            completed_transfer_ids=np.array(completed_transfers, "<i8").tobytes(),
            failed_transfer_ids=np.array(failed_transfers, "<i8").tobytes(),
        )

    def _require_scopes(self, *messages: Any) -> None:
        """A service of before there were adapters and salts would take these prompts for those of the base model."""
        if (self._opened.protocol_version or 1) < 2 and any(each.adapter or each.cache_salt for each in messages):
            text = "the service speaks version 1 of the protocol, without adapters and salts: upgrade the cache service"
            raise KvkeeperError(grpc.StatusCode.FAILED_PRECONDITION, "PROTOCOL_VERSION_UNSUPPORTED", text)

    async def _call(self, method: str, least_timeout_s: float = 0.0, /, **fields: Any) -> Any:
        """The answer of a unary method, over the step lane where that carries it.

        fields: of its request, beside the session's id and epoch.
        """
        request = getattr(pb, f"{method}Request")(**self._head, **fields)
        if "adapter" in fields:
            self._require_scopes(request)
        if (
            method in self._opened.lane_calls
            and (raw := await self._steps.call(method, request.SerializeToString())) is not None
        ):
            return getattr(pb, f"{method}Response").FromString(raw)
        return await self._transport.call_by_name(method, request, least_timeout_s)

    async def _sequence(self, method: str, /, **fields: Any) -> pb.SequenceInfo:
        """The sequence in the answer."""
        return (await self._call(method, **fields)).sequence

    async def close(self, drained: bool = True) -> pb.CloseSessionResponse:
        """End the session. drained says that nothing of it will write to the arena any more."""
        try:
            return await self._call("CloseSession", drained=drained)
        finally:
            self.disconnect()

    def disconnect(self) -> None:
        """Drop the stream of steps without a word to the service, as after its end; the session lives on for a short grace."""
        self._steps.cancel()

    async def create_sequence(
        self,
        sequence_id: int,
        token_ids: TokenIds,
        max_tokens: int = 0,
        tenant: str = "",
        priority: int = 0,
        retention: pb.Retention | None = None,
        start_number: int = 0,
        reuse_hint: pb.ReuseHint = pb.REUSE_HINT_UNSPECIFIED,
        retain_ms: int = 0,
        adapter: str = "",
        cache_salt: str = "",
    ) -> pb.CreateSequenceResponse:
        """Store a prompt. No retention keeps everything; start_number is a place in the order of arrivals, 0 draws the next.

        reuse_hint: what is known of the next use of its blocks, once it has ended. retain_ms: within what time it is expected.
        adapter: a digest of its content, as 64 hex digits. Nothing is shared between two adapters, or two salts.
        """
        given = max_tokens, tenant, priority, retention, start_number, reuse_hint, retain_ms, adapter, cache_salt
        sequence = NewSequence(sequence_id, token_ids, *given)
        (created,) = await self.create_sequences([sequence])
        if isinstance(created, KvkeeperError):
            raise created
        return created

    async def create_sequences(self, sequences: Sequence[NewSequence]) -> list[Created]:
        """Store several prompts, in order. Each has an answer of its own, or the error for which it was refused.

        One that is refused leaves the others be. A service of before there was this call raises UNIMPLEMENTED without a reason.
        """
        messages = [each.message() for each in sequences]
        self._require_scopes(*messages)
        answer = await self._call("CreateSequences", sequences=messages)
        return [each.response if each.HasField("response") else parse_error(each.error) for each in answer.results]

    async def extend(self, sequence_id: int, num_tokens: int, look_up: bool = True) -> pb.SequenceInfo:
        """Start the sequence if it waits, and reserve slots up to an absolute length, all or nothing."""
        return await self._sequence("ExtendSequence", sequence_id=sequence_id, num_tokens=num_tokens, skip_look_up=not look_up)

    async def commit(
        self, sequence_id: int, num_tokens: int, first_token_idx: int = 0, token_ids: TokenIds = ()
    ) -> pb.SequenceInfo:
        """Append token_ids at first_token_idx, and declare K and V written up to an absolute length."""
        return await self._sequence(
            "CommitSequence",
            sequence_id=sequence_id,
            num_tokens=num_tokens,
            first_token_idx=first_token_idx,
            token_ids=to_list(token_ids),
        )

    async def fork(self, parent_id: int, child_id: int, num_tokens: int = 0) -> pb.SequenceInfo:
        """Make a child that shares the parent's first tokens; 0 is all committed ones."""
        return await self._sequence("ForkSequence", parent_id=parent_id, child_id=child_id, num_tokens=num_tokens)

    async def truncate(self, sequence_id: int, num_tokens: int) -> pb.SequenceInfo:
        """Cut to an absolute length."""
        return await self._sequence("TruncateSequence", sequence_id=sequence_id, num_tokens=num_tokens)

    async def update(
        self,
        sequence_id: int,
        priority: int | None = None,
        retention: pb.Retention | None = None,
        reuse_hint: pb.ReuseHint | None = None,
    ) -> pb.SequenceInfo:
        """Change its priority, its retention or its reuse hint; None leaves it as it is."""
        return await self._sequence(
            "UpdateSequence", sequence_id=sequence_id, priority=priority, retention=retention, reuse_hint=reuse_hint
        )

    async def release(self, sequence_id: int) -> int:
        """Give the sequence's blocks back; the number that nothing else holds."""
        return (await self._call("ReleaseSequence", sequence_id=sequence_id)).num_dropped_blocks

    async def hand_off(self, sequence_id: int) -> bytes:
        """Offer a running sequence to another session of the pool, which takes it with the bytes that this returns.

        The sequence is this session's until then. No step that works on it may be in flight.
        """
        return (await self._call("HandOffSequence", sequence_id=sequence_id)).offer

    async def take(self, offer: bytes, sequence_id: int) -> pb.SequenceInfo:
        """Take a sequence that another session offers; it has this id from now on. No byte is copied."""
        return await self._sequence("TakeSequence", offer=offer, sequence_id=sequence_id)

    async def withdraw(self, sequence_id: int) -> None:
        """End the offer of a sequence. Raises KvkeeperError UNKNOWN_SEQUENCE where it was taken."""
        await self._call("WithdrawHandOff", sequence_id=sequence_id)

    async def swap_out(self, sequence_id: int) -> pb.SequenceInfo:
        """Move the sequence with its bytes to the host tier; does nothing to one that is there."""
        return await self._sequence("SwapOutSequence", sequence_id=sequence_id)

    async def swap_in(self, sequence_id: int) -> pb.SequenceInfo:
        """Move the sequence back to the device; does nothing to one that is there."""
        return await self._sequence("SwapInSequence", sequence_id=sequence_id)

    async def get(self, sequence_id: int, include_tokens: bool = False) -> pb.SequenceInfo:
        """One sequence with its block table."""
        return await self._sequence("GetSequence", sequence_id=sequence_id, include_tokens=include_tokens)

    async def get_block(self, block_id: int) -> pb.GetBlockResponse:
        """The state of one block of the pool, and the numbers of its holders."""
        return await self._call("GetBlock", block_id=block_id)

    async def match_prefix(
        self, token_ids: TokenIds, tenant: str = "", adapter: str = "", cache_salt: str = ""
    ) -> pb.MatchPrefixResponse:
        """Leading tokens that are cached now, by tier, as far as that is known without asking a disk or a server."""
        names = {"tenant": tenant, "adapter": adapter, "cache_salt": cache_salt}
        return await self._call("MatchPrefix", token_ids=to_list(token_ids), **names)

    async def explain_match(
        self, token_ids: TokenIds, tenant: str = "", adapter: str = "", cache_salt: str = ""
    ) -> pb.ExplainMatchResponse:
        """Leading tokens that are cached now, by tier, and why what a start would take of them ends where it does."""
        names = {"tenant": tenant, "adapter": adapter, "cache_salt": cache_salt}
        return await self._call("ExplainMatch", token_ids=to_list(token_ids), **names)

    def watch_events(
        self,
        tenant: str = "",
        timeout_s: float = WATCH_TIMEOUT_S,
        include_token_ids: bool = False,
        adapter: str = "",
        cache_salt: str = "",
    ) -> AsyncStream:
        """Iterate over the blocks cached for the tenant, of one adapter and salt, then every change of them.

        cancel() ends the watch.

        The messages are pb.WatchEventsResponse. A reader that falls behind gets WATCH_LAGGED and has to watch again.
        include_token_ids: of the blocks that are new to the reader, as LE32.
        """
        options = replace(self._transport.options, timeout_s=timeout_s)
        request = pb.WatchEventsRequest(
            **self._head, tenant=tenant, adapter=adapter, cache_salt=cache_salt, include_token_ids=include_token_ids
        )
        self._require_scopes(request)
        return self._transport.stream(self._transport.stub.WatchEvents, request, options)

    async def check_admission(
        self,
        token_ids: TokenIds = (),
        num_prompt_tokens: int = 0,
        num_new_tokens: int = 0,
        tenant: str = "",
        retention: pb.Retention | None = None,
        adapter: str = "",
        cache_salt: str = "",
    ) -> pb.CheckAdmissionResponse:
        """Whether a prompt could start now, later or never."""
        return await self._call(
            "CheckAdmission",
            token_ids=to_list(token_ids),
            num_prompt_tokens=num_prompt_tokens,
            num_new_tokens=num_new_tokens,
            tenant=tenant,
            retention=retention,
            adapter=adapter,
            cache_salt=cache_salt,
        )

    async def pin_prefix(
        self, token_ids: TokenIds, ttl_ms: int, tenant: str = "", adapter: str = "", cache_salt: str = ""
    ) -> pb.PinPrefixResponse:
        """Keep the cached blocks of a prefix from eviction for a time."""
        names = {"tenant": tenant, "adapter": adapter, "cache_salt": cache_salt}
        return await self._call("PinPrefix", token_ids=to_list(token_ids), ttl_ms=ttl_ms, **names)

    async def unpin_prefix(self, pin_id: str) -> None:
        """End a pin of this session."""
        await self._call("UnpinPrefix", pin_id=pin_id)

    async def hint_prefixes(self, *hints: pb.PrefixHint) -> tuple[int, ...]:
        """Say what is known of the next use of cached prefixes. The tokens of each that are cached on the device.

        REUSE_HINT_SOON retains, REUSE_HINT_NONE demotes, and no hint takes either back.
        """
        self._require_scopes(*hints)
        return tuple((await self._call("HintPrefix", hints=hints)).num_hinted_tokens)

    async def store_logits(self, sequence_id: int, num_tokens: int, logits: Logits) -> None:
        """Store the logits that follow a cached prefix of whole blocks, so that a prompt of just these tokens needs no pass."""
        await self._call(
            "StoreLogits", sequence_id=sequence_id, num_tokens=num_tokens, logits=logits.astype("<f4", casting="safe").tobytes()
        )

    async def read_logits(self, sequence_id: int) -> Logits:
        """The logits that a start with a full hit promised, until its step is completed."""
        return np.frombuffer((await self._call("ReadLogits", sequence_id=sequence_id)).logits, "<f4")

    async def clear_prefix_cache(self) -> pb.ClearPrefixCacheResponse:
        """Forget all cached blocks of the pool that nothing holds."""
        return await self._call("ClearPrefixCache")

    async def evict_blocks(
        self, num_free_blocks: int = 0, num_blocks: int = 0, max_utilization: float | None = None
    ) -> pb.EvictBlocksResponse:
        """Evict until so many blocks are free, so many cached blocks, or until this share of the pool is held or cached."""
        return await self._call(
            "EvictBlocks",
            SLICED_TIMEOUT_S,
            num_free_blocks=num_free_blocks,
            num_blocks=num_blocks,
            max_utilization=max_utilization,
        )

    async def select_victims(
        self,
        policy: "pb.VictimPolicy" = pb.VICTIM_POLICY_PRIORITY,
        num_blocks: int = 0,
        max_utilization: float | None = None,
    ) -> pb.SelectVictimsResponse:
        """The session's sequences to preempt so that so many blocks come free; without a number, one victim."""
        return await self._call("SelectVictims", policy=policy, num_blocks=num_blocks, max_utilization=max_utilization)

    async def collect_garbage(self) -> pb.CollectGarbageResponse:
        """Free blocks that nothing can use any more."""
        return await self._call("CollectGarbage")

    async def write_kv(
        self,
        sequence_id: int,
        first_token_idx: int,
        kv: KvTokens,
        layers: Sequence[int] = (),
        kv_dtype: "pb.KvDtype" = pb.KV_DTYPE_UNSPECIFIED,
    ) -> pb.WriteKvResponse:
        """Write K and V into reserved, uncommitted slots; no layers are all layers. kv_dtype: theirs, if not the spec's.

        Raises ValueError as kv_chunks.split does.
        """
        head = {**self._head, "sequence_id": sequence_id, "kv_dtype": kv_dtype}
        return await self._transport.call_by_name(
            "WriteKv", list(kv_chunks.split(self.pool.spec, head, first_token_idx, kv, layers))
        )

    async def read_kv(
        self,
        sequence_id: int,
        first_token_idx: int = 0,
        num_tokens: int = 0,
        layers: Sequence[int] = (),
        kv_dtype: "pb.KvDtype" = pb.KV_DTYPE_UNSPECIFIED,
    ) -> KvTokens:
        """K and V of committed tokens; 0 tokens are all from the first on, no layers are all that have K and V.

        kv_dtype: of what is returned, if not in the spec's: needed where that has scales. Raises ValueError for layers whose K
        and V are of different shapes.
        """
        kv_chunks.select_layers(self.pool.spec, layers)
        request = pb.ReadKvRequest(
            **self._head,
            sequence_id=sequence_id,
            first_token_idx=first_token_idx,
            num_tokens=num_tokens,
            layer_idx=layers,
            kv_dtype=kv_dtype,
        )
        chunks = await self._transport.collect(self._transport.stub.ReadKv, request)
        return kv_chunks.join(self.pool.spec, layers, chunks)

    async def list(self) -> tuple[pb.SequenceInfo, ...]:
        """The session's sequences, without tables."""
        request = pb.ListSequencesRequest(session_id=self.session_id)
        return await self._transport.list_all("ListSequences", request, "sequences")


def _close_lane(lane: socket.socket | None) -> None:
    if lane is not None:
        lane.close()


def _close_both(attached: tuple[Arena, socket.socket | None]) -> None:
    attached[0].close()
    _close_lane(attached[1])
