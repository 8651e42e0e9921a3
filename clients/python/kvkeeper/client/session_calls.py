"""Calls of one session, with request and answer: pure, shared by the synchronous and the asyncio client."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kvkeeper.cache.v1 import cache_service_pb2 as pb
from kvkeeper.client import kv_chunks
from kvkeeper.client.cache_calls import SLICED_TIMEOUT_S, Call, whole
from kvkeeper.client.errors import KvkeeperError, error_of_status
from kvkeeper.client.kv_chunks import KvTokens

TokenIds = Sequence[int] | npt.NDArray[Any]
Logits = npt.NDArray[np.float32]
WATCH_TIMEOUT_S = 86_400.0  # a watch lasts as long as its session, but every call has a deadline


@dataclass(frozen=True, slots=True)
class NewSequence:
    """A sequence to create together with others; what each field means is said at CacheSession.create_sequence."""

    sequence_id: int
    token_ids: TokenIds
    max_tokens: int = 0
    tenant: str = ""
    priority: int = 0
    retention: pb.Retention | None = None
    start_number: int = 0
    reuse_hint: pb.ReuseHint = pb.REUSE_HINT_UNSPECIFIED


Created = pb.CreateSequenceResponse | KvkeeperError  # what became of one of them


@dataclass(frozen=True, slots=True)
class SessionCalls:
    """Calls of one session; every one carries its id and epoch."""

    session_id: str
    epoch: int
    spec: pb.KvSpec

    @property
    def head(self) -> dict[str, Any]:
        return {"session_id": self.session_id, "epoch": self.epoch}

    def renew(
        self, completed_step_id: int, completed_transfers: Sequence[int], failed_transfers: Sequence[int]
    ) -> Call[pb.RenewSessionResponse]:
        request = pb.RenewSessionRequest(
            **self.head,
            completed_step_id=completed_step_id,
            completed_transfer_ids=np.array(completed_transfers, "<i8").tobytes(),
            failed_transfer_ids=np.array(failed_transfers, "<i8").tobytes(),
        )
        return Call("RenewSession", request, whole)

    def close(self, drained: bool) -> Call[pb.CloseSessionResponse]:
        return Call("CloseSession", pb.CloseSessionRequest(**self.head, drained=drained), whole)

    def create_sequence(
        self,
        sequence_id: int,
        token_ids: TokenIds,
        max_tokens: int,
        tenant: str,
        priority: int,
        retention: pb.Retention | None,
        start_number: int,
        reuse_hint: pb.ReuseHint,
    ) -> Call[pb.CreateSequenceResponse]:
        request = pb.CreateSequenceRequest(
            **self.head,
            sequence_id=sequence_id,
            packed_token_ids=_packed(token_ids),
            max_tokens=max_tokens,
            tenant=tenant,
            priority=priority,
            retention=retention,
            start_number=start_number,
            reuse_hint=reuse_hint,
        )
        return Call("CreateSequence", request, whole)

    def create_sequences(self, sequences: Sequence[NewSequence]) -> Call[list[Created]]:
        request = pb.CreateSequencesRequest(**self.head, sequences=[_new_sequence(each) for each in sequences])
        return Call("CreateSequences", request, _created)

    def extend(self, sequence_id: int, num_tokens: int, look_up: bool) -> Call[pb.SequenceInfo]:
        request = pb.ExtendSequenceRequest(
            **self.head, sequence_id=sequence_id, num_tokens=num_tokens, skip_look_up=not look_up
        )
        return Call("ExtendSequence", request, _sequence)

    def commit(self, sequence_id: int, num_tokens: int, first_token_idx: int, token_ids: TokenIds) -> Call[pb.SequenceInfo]:
        request = pb.CommitSequenceRequest(
            **self.head,
            sequence_id=sequence_id,
            num_tokens=num_tokens,
            first_token_idx=first_token_idx,
            token_ids=_checked(token_ids).tolist(),
        )
        return Call("CommitSequence", request, _sequence)

    def fork(self, parent_id: int, child_id: int, num_tokens: int) -> Call[pb.SequenceInfo]:
        request = pb.ForkSequenceRequest(**self.head, parent_id=parent_id, child_id=child_id, num_tokens=num_tokens)
        return Call("ForkSequence", request, _sequence)

    def truncate(self, sequence_id: int, num_tokens: int) -> Call[pb.SequenceInfo]:
        request = pb.TruncateSequenceRequest(**self.head, sequence_id=sequence_id, num_tokens=num_tokens)
        return Call("TruncateSequence", request, _sequence)

    def update(
        self, sequence_id: int, priority: int | None, retention: pb.Retention | None, reuse_hint: pb.ReuseHint | None
    ) -> Call[pb.SequenceInfo]:
        request = pb.UpdateSequenceRequest(
            **self.head, sequence_id=sequence_id, priority=priority, retention=retention, reuse_hint=reuse_hint
        )
        return Call("UpdateSequence", request, _sequence)

    def release(self, sequence_id: int) -> Call[int]:
        request = pb.ReleaseSequenceRequest(**self.head, sequence_id=sequence_id)
        return Call("ReleaseSequence", request, lambda answer: answer.num_dropped_blocks)

    def hand_off(self, sequence_id: int) -> Call[bytes]:
        request = pb.HandOffSequenceRequest(**self.head, sequence_id=sequence_id)
        return Call("HandOffSequence", request, lambda answer: answer.offer)

    def take(self, offer: bytes, sequence_id: int) -> Call[pb.SequenceInfo]:
        return Call("TakeSequence", pb.TakeSequenceRequest(**self.head, offer=offer, sequence_id=sequence_id), _sequence)

    def withdraw(self, sequence_id: int) -> Call[pb.WithdrawHandOffResponse]:
        return Call("WithdrawHandOff", pb.WithdrawHandOffRequest(**self.head, sequence_id=sequence_id), whole)

    def swap_out(self, sequence_id: int) -> Call[pb.SequenceInfo]:
        return Call("SwapOutSequence", pb.SwapOutSequenceRequest(**self.head, sequence_id=sequence_id), _sequence)

    def swap_in(self, sequence_id: int) -> Call[pb.SequenceInfo]:
        return Call("SwapInSequence", pb.SwapInSequenceRequest(**self.head, sequence_id=sequence_id), _sequence)

    def get(self, sequence_id: int, include_tokens: bool) -> Call[pb.SequenceInfo]:
        request = pb.GetSequenceRequest(**self.head, sequence_id=sequence_id, include_tokens=include_tokens)
        return Call("GetSequence", request, _sequence)

    def get_block(self, block_id: int) -> Call[pb.GetBlockResponse]:
        return Call("GetBlock", pb.GetBlockRequest(**self.head, block_id=block_id), whole)

    def match_prefix(self, token_ids: TokenIds, tenant: str) -> Call[pb.MatchPrefixResponse]:
        request = pb.MatchPrefixRequest(**self.head, token_ids=_checked(token_ids).tolist(), tenant=tenant)
        return Call("MatchPrefix", request, whole)

    def explain_match(self, token_ids: TokenIds, tenant: str) -> Call[pb.ExplainMatchResponse]:
        request = pb.ExplainMatchRequest(**self.head, token_ids=_checked(token_ids).tolist(), tenant=tenant)
        return Call("ExplainMatch", request, whole)

    def watch_events(self, tenant: str, include_token_ids: bool) -> pb.WatchEventsRequest:
        return pb.WatchEventsRequest(**self.head, tenant=tenant, include_token_ids=include_token_ids)

    def check_admission(
        self,
        token_ids: TokenIds,
        num_prompt_tokens: int,
        num_new_tokens: int,
        tenant: str,
        retention: pb.Retention | None,
    ) -> Call[pb.CheckAdmissionResponse]:
        request = pb.CheckAdmissionRequest(
            **self.head,
            token_ids=_checked(token_ids).tolist(),
            num_prompt_tokens=num_prompt_tokens,
            num_new_tokens=num_new_tokens,
            tenant=tenant,
            retention=retention,
        )
        return Call("CheckAdmission", request, whole)

    def pin_prefix(self, token_ids: TokenIds, ttl_ms: int, tenant: str) -> Call[pb.PinPrefixResponse]:
        request = pb.PinPrefixRequest(**self.head, token_ids=_checked(token_ids).tolist(), ttl_ms=ttl_ms, tenant=tenant)
        return Call("PinPrefix", request, whole)

    def unpin_prefix(self, pin_id: str) -> Call[None]:
        return Call("UnpinPrefix", pb.UnpinPrefixRequest(**self.head, pin_id=pin_id), lambda _: None)

    def store_logits(self, sequence_id: int, num_tokens: int, logits: Logits) -> Call[None]:
        request = pb.StoreLogitsRequest(
            **self.head, sequence_id=sequence_id, num_tokens=num_tokens, logits=logits.astype("<f4", casting="safe").tobytes()
        )
        return Call("StoreLogits", request, lambda _: None)

    def read_logits(self, sequence_id: int) -> Call[Logits]:
        request = pb.ReadLogitsRequest(**self.head, sequence_id=sequence_id)
        return Call("ReadLogits", request, lambda answer: np.frombuffer(answer.logits, "<f4"))

    def clear_prefix_cache(self) -> Call[pb.ClearPrefixCacheResponse]:
        return Call("ClearPrefixCache", pb.ClearPrefixCacheRequest(**self.head), whole)

    def evict_blocks(
        self, num_free_blocks: int, num_blocks: int, max_utilization: float | None
    ) -> Call[pb.EvictBlocksResponse]:
        request = pb.EvictBlocksRequest(
            **self.head, num_free_blocks=num_free_blocks, num_blocks=num_blocks, max_utilization=max_utilization
        )
        return Call("EvictBlocks", request, whole, least_timeout_s=SLICED_TIMEOUT_S)

    def select_victims(
        self, policy: "pb.VictimPolicy", num_blocks: int, max_utilization: float | None
    ) -> Call[pb.SelectVictimsResponse]:
        request = pb.SelectVictimsRequest(**self.head, policy=policy, num_blocks=num_blocks, max_utilization=max_utilization)
        return Call("SelectVictims", request, whole)

    def collect_garbage(self) -> Call[pb.CollectGarbageResponse]:
        return Call("CollectGarbage", pb.CollectGarbageRequest(**self.head), whole)

    def write_kv(
        self, sequence_id: int, first_token_idx: int, kv: KvTokens, layers: Sequence[int], kv_dtype: "pb.KvDtype"
    ) -> Call[pb.WriteKvResponse]:
        head = {**self.head, "sequence_id": sequence_id, "kv_dtype": kv_dtype}
        return Call("WriteKv", list(kv_chunks.split(self.spec, head, first_token_idx, kv, layers)), whole)

    def read_kv(
        self, sequence_id: int, first_token_idx: int, num_tokens: int, layers: Sequence[int], kv_dtype: "pb.KvDtype"
    ) -> Call[KvTokens]:
        request = pb.ReadKvRequest(
            **self.head,
            sequence_id=sequence_id,
            first_token_idx=first_token_idx,
            num_tokens=num_tokens,
            layer_idx=layers,
            kv_dtype=kv_dtype,
        )
        return Call("ReadKv", request, lambda chunks: kv_chunks.join(self.spec, layers, chunks), streams_answers=True)


def _sequence(answer: Any) -> pb.SequenceInfo:
    return answer.sequence


def _new_sequence(new: NewSequence) -> pb.NewSequence:
    return pb.NewSequence(
        sequence_id=new.sequence_id,
        packed_token_ids=_packed(new.token_ids),
        max_tokens=new.max_tokens,
        tenant=new.tenant,
        priority=new.priority,
        retention=new.retention,
        start_number=new.start_number,
        reuse_hint=new.reuse_hint,
    )


def _created(answer: pb.CreateSequencesResponse) -> list[Created]:
    return [each.response if each.HasField("response") else error_of_status(each.error) for each in answer.results]


def _checked(token_ids: TokenIds) -> npt.NDArray[Any]:
    """The ids as an integer array; a cast on the way to the wire must not turn a wrong id into a valid one."""
    array = np.asarray(token_ids)
    if array.size == 0:
        return np.empty(0, np.int32)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise TypeError("token ids must be a one-dimensional sequence of integers")
    if array.min() < 0 or array.max() >= 1 << 31:
        raise ValueError("token ids are 0 to 2^31 - 1")
    return array


def _packed(token_ids: TokenIds) -> bytes:
    return _checked(token_ids).astype("<i4", copy=False).tobytes()
