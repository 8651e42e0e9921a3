"""One session of the cache service for threads: the same calls as in cache.py, blocking. Without a lane steps are unary calls.

A session is not for use from two threads at once.
"""

import contextlib
from collections.abc import Sequence
from dataclasses import replace
from typing import TypeVar

from kvkeeper.cache.v1 import cache_service_pb2 as pb
from kvkeeper.client.arena import Arena, attach_arena, attach_arena_and_lane
from kvkeeper.client.cache_calls import Call, all_sequences, do
from kvkeeper.client.errors import KvkeeperError
from kvkeeper.client.kv_chunks import KvTokens
from kvkeeper.client.session_calls import WATCH_TIMEOUT_S, Created, Logits, NewSequence, SessionCalls, TokenIds
from kvkeeper.client.step_lane import LaneBroken, MessageTooLarge, attach_lane
from kvkeeper.client.step_lane_sync import BlockingStepLane
from kvkeeper.client.steps import StepItems, StepResult, decode, encode
from kvkeeper.client.transport import Stream, Transport

T = TypeVar("T")
_STEP_METHOD = "/kvkeeper.cache.v1.CacheService/Step"


class CacheSession:
    """A lease on a pool. Every step renews it; in between, the client calls renew()."""

    def __init__(self, transport: Transport, opened: pb.OpenSessionResponse) -> None:
        self.session_id: str = opened.session_id
        self.epoch: int = opened.epoch
        self.pool: pb.PoolInfo = opened.pool
        self.ttl_ms: int = opened.ttl_ms
        self.step_id = 0  # the last one answered
        self._transport = transport
        self._opened = opened
        self._calls = SessionCalls(opened.session_id, opened.epoch, opened.pool.spec)
        self._lane: BlockingStepLane | None = None
        self._step = transport.channel.unary_unary(_STEP_METHOD, request_serializer=None, response_deserializer=None)

    def __enter__(self) -> "CacheSession":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def has_step_lane(self) -> bool:
        """Whether steps go over a socket of this host beside gRPC."""
        return self._lane is not None and self._lane.is_open

    @property
    def attach_point(self) -> tuple[str, str]:
        """Path and token of the attach socket, for the processes of other ranks: see arena.attach_arena."""
        return self._opened.attach_socket_path, self._opened.attach_token

    def attach(self, *, step_lane: bool = True) -> Arena:
        """Map the pool's memory; once per session, before its first step.

        step_lane: also have a socket for steps, where the service offers one.
        """
        opened, pool, timeout_s = self._opened, self.pool, self._transport.options.timeout_s
        arguments = opened.attach_socket_path, opened.attach_token, pool.arena_bytes, timeout_s, pool.host_arena_bytes
        if not (step_lane and opened.offers_step_lane):
            return attach_arena(*arguments)
        arena, lane = attach_arena_and_lane(*arguments)
        self._lane = None if lane is None else BlockingStepLane(lane)
        return arena

    def attach_step_lane(self) -> bool:
        """Have a socket for steps without mapping the memory, instead of attach(). Whether there is one now.

        There is none where the service is on another host, or does not trust this process; steps then go over gRPC.
        """
        opened, timeout_s = self._opened, self._transport.options.timeout_s
        if opened.offers_step_lane:
            with contextlib.suppress(KvkeeperError):
                lane = attach_lane(opened.attach_socket_path, opened.attach_token, timeout_s)
                self._lane = None if lane is None else BlockingStepLane(lane)
        return self.has_step_lane

    def step(self, items: StepItems, completed_step_id: int | None = None, traceparent: str = "") -> StepResult:
        """Apply one iteration. completed_step_id None says that the device work of all earlier steps is done.

        A repeat sends the same bytes, which the service applies exactly once. After a failure the step id is not used up;
        after a deadline it is not known whether the step was applied.
        """
        step_id = self.step_id + 1
        completed = self.step_id if completed_step_id is None else completed_step_id
        request = encode(items, self.session_id, self.epoch, step_id, completed, traceparent)
        answer = decode(self._exchange(request))
        self.step_id = step_id
        return answer

    def _exchange(self, request: bytes) -> bytes:
        """Over the lane where there is one. What it cannot carry is repeated as a unary call, which leaves a whole lane be."""
        if self._lane is not None:
            try:
                return self._lane.exchange(request, self._transport.options.timeout_s)
            except LaneBroken:
                self._lane = None
            except MessageTooLarge:
                pass
            except KvkeeperError as error:
                if not error.unavailable:
                    raise
        answer: bytes = self._transport.call(self._step, request)
        return answer

    def renew(
        self, completed_step_id: int = 0, completed_transfers: Sequence[int] = (), failed_transfers: Sequence[int] = ()
    ) -> pb.RenewSessionResponse:
        """Renew the lease; completed_step_id 0 reports nothing. Transfer orders may be reported, too, by their ids."""
        return self._do(self._calls.renew(completed_step_id, completed_transfers, failed_transfers))

    def close(self, drained: bool = True) -> pb.CloseSessionResponse:
        """End the session. drained says that nothing of it will write to the arena any more."""
        try:
            return self._do(self._calls.close(drained))
        finally:
            self.disconnect()

    def disconnect(self) -> None:
        """Drop the stream of steps without a word to the service, as after its end; the session lives on for a short grace."""
        if self._lane is not None:
            self._lane.close()

    def create_sequence(
        self,
        sequence_id: int,
        token_ids: TokenIds,
        max_tokens: int = 0,
        tenant: str = "",
        priority: int = 0,
        retention: pb.Retention | None = None,
        start_number: int = 0,
        reuse_hint: pb.ReuseHint = pb.REUSE_HINT_UNSPECIFIED,
    ) -> pb.CreateSequenceResponse:
        """Store a prompt. No retention keeps everything; start_number is a place in the order of arrivals, 0 draws the next.

        reuse_hint: what is known of the next use of its blocks, once it has ended.
        """
        call = self._calls.create_sequence(
            sequence_id, token_ids, max_tokens, tenant, priority, retention, start_number, reuse_hint
        )
        return self._do(call)

    def create_sequences(self, sequences: Sequence[NewSequence]) -> list[Created]:
        """Store several prompts, in order. Each has an answer of its own, or the error for which it was refused.

        One that is refused leaves the others be. A service of before there was this call raises UNIMPLEMENTED without a reason.
        """
        return self._do(self._calls.create_sequences(sequences))

    def extend(self, sequence_id: int, num_tokens: int, look_up: bool = True) -> pb.SequenceInfo:
        """Start the sequence if it waits, and reserve slots up to an absolute length, all or nothing."""
        return self._do(self._calls.extend(sequence_id, num_tokens, look_up))

    def commit(self, sequence_id: int, num_tokens: int, first_token_idx: int = 0, token_ids: TokenIds = ()) -> pb.SequenceInfo:
        """Append token_ids at first_token_idx, and declare K and V written up to an absolute length."""
        return self._do(self._calls.commit(sequence_id, num_tokens, first_token_idx, token_ids))

    def fork(self, parent_id: int, child_id: int, num_tokens: int = 0) -> pb.SequenceInfo:
        """Make a child that shares the parent's first tokens; 0 is all committed ones."""
        return self._do(self._calls.fork(parent_id, child_id, num_tokens))

    def truncate(self, sequence_id: int, num_tokens: int) -> pb.SequenceInfo:
        """Cut to an absolute length."""
        return self._do(self._calls.truncate(sequence_id, num_tokens))

    def update(
        self,
        sequence_id: int,
        priority: int | None = None,
        retention: pb.Retention | None = None,
        reuse_hint: pb.ReuseHint | None = None,
    ) -> pb.SequenceInfo:
        """Change its priority, its retention or its reuse hint; None leaves it as it is."""
        return self._do(self._calls.update(sequence_id, priority, retention, reuse_hint))

    def release(self, sequence_id: int) -> int:
        """Give the sequence's blocks back; the number that nothing else holds."""
        return self._do(self._calls.release(sequence_id))

    def hand_off(self, sequence_id: int) -> bytes:
        """Offer a running sequence to another session of the pool, which takes it with the bytes that this answers.

        The sequence is this session's until then. No step that works on it may be in flight.
        """
        return self._do(self._calls.hand_off(sequence_id))

    def take(self, offer: bytes, sequence_id: int) -> pb.SequenceInfo:
        """Take a sequence that another session offers; it has this id from now on. No byte is copied."""
        return self._do(self._calls.take(offer, sequence_id))

    def withdraw(self, sequence_id: int) -> None:
        """End the offer of a sequence. Raises KvkeeperError UNKNOWN_SEQUENCE where it was taken."""
        self._do(self._calls.withdraw(sequence_id))

    def swap_out(self, sequence_id: int) -> pb.SequenceInfo:
        """Move the sequence with its bytes to the host tier; does nothing to one that is there."""
        return self._do(self._calls.swap_out(sequence_id))

    def swap_in(self, sequence_id: int) -> pb.SequenceInfo:
        """Move the sequence back to the device; does nothing to one that is there."""
        return self._do(self._calls.swap_in(sequence_id))

    def get(self, sequence_id: int, include_tokens: bool = False) -> pb.SequenceInfo:
        """One sequence with its block table."""
        return self._do(self._calls.get(sequence_id, include_tokens))

    def get_block(self, block_id: int) -> pb.GetBlockResponse:
        """The state of one block of the pool, and the numbers of its holders."""
        return self._do(self._calls.get_block(block_id))

    def match_prefix(self, token_ids: TokenIds, tenant: str = "") -> pb.MatchPrefixResponse:
        """Leading tokens that are cached now, by tier, as far as that is known without asking a disk or a server."""
        return self._do(self._calls.match_prefix(token_ids, tenant))

    def explain_match(self, token_ids: TokenIds, tenant: str = "") -> pb.ExplainMatchResponse:
        """Leading tokens that are cached now, by tier, and why what a start would take of them ends where it does."""
        return self._do(self._calls.explain_match(token_ids, tenant))

    def watch_events(self, tenant: str = "", timeout_s: float = WATCH_TIMEOUT_S, include_token_ids: bool = False) -> Stream:
        """Iterate over the blocks cached for the tenant, then every change of them; cancel() ends the watch.

        The messages are pb.WatchEventsResponse. A reader that falls behind gets WATCH_LAGGED and has to watch again.
        include_token_ids: of the blocks that are new to the reader, as LE32.
        """
        options = replace(self._transport.options, timeout_s=timeout_s)
        return self._transport.stream(
            self._transport.stub.WatchEvents, self._calls.watch_events(tenant, include_token_ids), options
        )

    def check_admission(
        self,
        token_ids: TokenIds = (),
        num_prompt_tokens: int = 0,
        num_new_tokens: int = 0,
        tenant: str = "",
        retention: pb.Retention | None = None,
    ) -> pb.CheckAdmissionResponse:
        """Whether a prompt could start now, later or never."""
        return self._do(self._calls.check_admission(token_ids, num_prompt_tokens, num_new_tokens, tenant, retention))

    def pin_prefix(self, token_ids: TokenIds, ttl_ms: int, tenant: str = "") -> pb.PinPrefixResponse:
        """Keep the cached blocks of a prefix from eviction for a time."""
        return self._do(self._calls.pin_prefix(token_ids, ttl_ms, tenant))

    def unpin_prefix(self, pin_id: str) -> None:
        """End a pin of this session."""
        self._do(self._calls.unpin_prefix(pin_id))

    def store_logits(self, sequence_id: int, num_tokens: int, logits: Logits) -> None:
        """Store the logits that follow a cached prefix of whole blocks, so that a prompt of just these tokens needs no pass."""
        self._do(self._calls.store_logits(sequence_id, num_tokens, logits))

    def read_logits(self, sequence_id: int) -> Logits:
        """The logits that a start with a full hit promised, until its step is completed."""
        return self._do(self._calls.read_logits(sequence_id))

    def clear_prefix_cache(self) -> pb.ClearPrefixCacheResponse:
        """Forget all cached blocks of the pool that nothing holds."""
        return self._do(self._calls.clear_prefix_cache())

    def evict_blocks(
        self, num_free_blocks: int = 0, num_blocks: int = 0, max_utilization: float | None = None
    ) -> pb.EvictBlocksResponse:
        """Evict until so many blocks are free, so many cached blocks, or until this share of the pool is held or cached."""
        return self._do(self._calls.evict_blocks(num_free_blocks, num_blocks, max_utilization))

    def select_victims(
        self,
        policy: "pb.VictimPolicy" = pb.VICTIM_POLICY_PRIORITY,
        num_blocks: int = 0,
        max_utilization: float | None = None,
    ) -> pb.SelectVictimsResponse:
        """The session's sequences to preempt so that so many blocks come free; without a number, one victim."""
        return self._do(self._calls.select_victims(policy, num_blocks, max_utilization))

    def collect_garbage(self) -> pb.CollectGarbageResponse:
        """Free blocks that nothing can use any more."""
        return self._do(self._calls.collect_garbage())

    def write_kv(
        self,
        sequence_id: int,
        first_token_idx: int,
        kv: KvTokens,
        layers: Sequence[int] = (),
        kv_dtype: "pb.KvDtype" = pb.KV_DTYPE_UNSPECIFIED,
    ) -> pb.WriteKvResponse:
        """Write K and V into reserved, uncommitted slots; no layers are all layers. kv_dtype: theirs, if not the spec's."""
        return self._do(self._calls.write_kv(sequence_id, first_token_idx, kv, layers, kv_dtype))

    def read_kv(
        self,
        sequence_id: int,
        first_token_idx: int = 0,
        num_tokens: int = 0,
        layers: Sequence[int] = (),
        kv_dtype: "pb.KvDtype" = pb.KV_DTYPE_UNSPECIFIED,
    ) -> KvTokens:
        """K and V of committed tokens; 0 tokens are all from the first on, no layers are all layers.

        kv_dtype: to be told in, if not in the spec's: needed where that has scales.
        """
        return self._do(self._calls.read_kv(sequence_id, first_token_idx, num_tokens, layers, kv_dtype))

    def list(self) -> tuple[pb.SequenceInfo, ...]:
        """The session's sequences, without tables."""
        return all_sequences(self._transport, self.session_id)

    def _do(self, call: Call[T]) -> T:
        return do(self._transport, call)
