"""Limits of a pool: how far the scheduler may go on it, and which bound makes sequences as short as they are."""

from kvkeeper.cache.v1 import cache_service_pb2 as pb

from ..compute.served_model import ServedModel
from ..config import EngineConfig
from ..scheduler.headroom import Preemption
from ..scheduler.limits import WHOLE, Limits, ReadSpan

_OWN_BOUND = "see --max-tokens-per-sequence of the engine service"
_CACHE_BOUND = "see --max-tokens-per-sequence of the cache service, and its --max-sequences"
_CPU_CHUNK, _DEVICE_CHUNK = 512, 2048  # a step with a prompt costs a device's host the same for few tokens as for many
_POOL_BOUND = "the pool holds no more, see --pool-memory and --num-blocks of the cache service"


def make_limits(pool: pb.PoolInfo, model: ServedModel, config: EngineConfig) -> Limits:
    """What the scheduler may do on this pool."""
    own = _OWN_BOUND, config.max_tokens_per_sequence or pool.max_tokens_with_retention
    of_cache = _CACHE_BOUND, pool.max_tokens_with_retention
    spans = tuple(map(_parse_span, pool.spec.groups)) or (WHOLE,)
    of_pool = _POOL_BOUND, (pool.num_blocks - 1) * pool.block_size
    if len(spans) > 1:
        of_pool = _POOL_BOUND, pool.max_tokens_per_sequence
    of_model = f"the model has {model.max_len} positions", model.max_len
    bound, max_len = min((of_model, of_pool, of_cache, own), key=lambda bounded: bounded[1])  # of equals the first
    retained_bound, most = min((of_cache, own), key=lambda bounded: bounded[1])
    max_running = min(config.max_sequences, pool.max_sequences)
    has_tail = any(group.kind == pb.LAYER_GROUP_KIND_TAIL for group in pool.spec.groups)
    return Limits(
        block_size=pool.block_size,
        max_len=max_len,
        max_known_sequences=pool.max_sequences,
        max_step_items=pool.max_step_items,
        max_running=max_running,
        token_budget=config.token_budget,
        chunk_size=config.chunk_size or (_CPU_CHUNK if config.device == "cpu" else _DEVICE_CHUNK),
        prefill_budget=config.prefill_budget,
        decode_budget=config.decode_budget or max_running,
        client_shares=config.client_shares,
        preemption=Preemption(config.preemption),
        num_host_blocks=pool.num_host_blocks,
        block_bytes=pool.block_bytes,
        prefix_caching=pool.prefix_caching,
        takes_partial=pool.prefix_caching and not has_tail,
        num_usable_blocks=pool.num_blocks - 1,
        group_spans=spans,
        has_tail=has_tail,
        max_distance=model.max_len,
        max_retained_len=0 if model.refuses_retention else most,
        bound=bound,
        retained_bound=retained_bound,
    )


def _parse_span(group: pb.LayerGroup) -> ReadSpan:
    """What a token reads in a group; of states that of the token before."""
    if group.kind == pb.LAYER_GROUP_KIND_RECURRENT:
        return ReadSpan(2, checkpoint_blocks=group.checkpoint_blocks)
    return ReadSpan(group.window_tokens, group.kind == pb.LAYER_GROUP_KIND_CHUNKED)
