"""vLLM's KV cache manager in this process, as a peer of a step: where vllm can be imported, which kvkeeper does not ask for.

Does for each sequence of a step what vLLM's scheduler does: append the token that was computed, allocate a slot for the next
one, free what ends, look up and allocate what starts. Scheduling itself is not counted, nor is making a request.
"""

import time
from typing import Any

import numpy as np

from kvkeeper.client.steps import StepItems

_MOST_TOKENS = 4096


class VllmManager:
    """One KVCacheManager and the requests of a load, by sequence id."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self._vllm = vllm = _Imports()
        vllm.init_none_hash(vllm.sha256)
        self._hasher = vllm.get_request_block_hasher(block_size, vllm.sha256)
        spec = vllm.FullAttentionSpec(block_size=block_size, num_kv_heads=1, head_size=8, dtype=vllm.float16)
        config = vllm.KVCacheConfig(num_blocks, [], [vllm.KVCacheGroupSpec(["layer"], spec)])
        sizes = {"scheduler_block_size": block_size, "hash_block_size": block_size}
        self._manager = vllm.KVCacheManager(config, max_model_len=_MOST_TOKENS, **sizes)
        self._params = vllm.SamplingParams(max_tokens=_MOST_TOKENS)
        self._requests: dict[int, Any] = {}

    def start(self, sequences: list[tuple[int, np.ndarray]]) -> None:
        """Starts sequences: ids and prompts."""
        for sequence_id, prompt in sequences:
            self._create(sequence_id, prompt)
            self._start(self._requests[sequence_id])

    def step(self, items: StepItems, created: list[tuple[int, np.ndarray]]) -> float:
        """Goes through one step of the load, whose starts are `created`. Returns its microseconds."""
        for sequence_id, prompt in created:
            self._create(sequence_id, prompt)
        requests, manager = self._requests, self._manager
        begin = time.perf_counter()
        for sequence_id, token in zip(items.commit_ids.tolist(), items.commit_tokens.tolist(), strict=True):
            requests[sequence_id].append_output_token_ids(token)
        for sequence_id in items.release_ids.tolist():
            manager.free(requests.pop(sequence_id))
        for sequence_id in items.reserve_ids.tolist():
            request = requests[sequence_id]
            blocks = manager.allocate_slots(request, 1)
            assert blocks is not None, "the pool is large enough"
            blocks.get_block_ids(allow_none=True)
            request.num_computed_tokens += 1
        for sequence_id, _ in created:
            self._start(requests[sequence_id])
        return (time.perf_counter() - begin) * 1e6

    def _create(self, sequence_id: int, prompt: np.ndarray) -> None:
        self._requests[sequence_id] = self._vllm.Request(
            request_id=str(sequence_id),
            prompt_token_ids=prompt.tolist(),
            sampling_params=self._params,
            pooling_params=None,
            block_hasher=self._hasher,
        )

    def _start(self, request: Any) -> None:
        hit, num_hit_tokens, *_ = self._manager.get_computed_blocks(request)
        blocks = self._manager.allocate_slots(request, request.num_tokens - num_hit_tokens, num_hit_tokens, hit)
        assert blocks is not None, "the pool is large enough"
        blocks.get_block_ids()
        request.num_computed_tokens = request.num_tokens


class _Imports:
    """The names of vLLM 0.33 that the manager needs. Raises ImportError."""

    def __init__(self) -> None:
        from torch import float16
        from vllm.sampling_params import SamplingParams
        from vllm.utils.hashing import sha256
        from vllm.v1.core.kv_cache_manager import KVCacheManager
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
        from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
        from vllm.v1.request import Request

        self.float16, self.sha256, self.SamplingParams, self.Request = float16, sha256, SamplingParams, Request
        self.KVCacheManager, self.KVCacheConfig, self.KVCacheGroupSpec = KVCacheManager, KVCacheConfig, KVCacheGroupSpec
        self.FullAttentionSpec, self.init_none_hash = FullAttentionSpec, init_none_hash
        self.get_request_block_hasher = get_request_block_hasher


def why_not() -> str | None:
    """Why there is no such peer here; None where there is."""
    try:
        _Imports()
    except ImportError as error:
        return f"vllm cannot be imported: {error}"
    return None
