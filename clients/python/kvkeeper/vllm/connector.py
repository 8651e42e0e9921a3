"""The connector as vLLM v1 knows it: its calls become those of planner.py and transfers.py, its objects plain values.

Nothing is decided here. The scheduler's side looks up and orders; each worker's side maps its pool and moves blocks on a
thread. A prompt with pictures, embeddings or an adapter of unknown weights passes by: its tokens do not say what its K and V
are.
"""

import hashlib
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import grpc
import numpy as np
import torch
import vllm
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)
from vllm.distributed.parallel_state import get_pp_group, get_tp_group
from vllm.v1.kv_cache_interface import FullAttentionSpec

from kvkeeper.cache.v1 import cache_service_pb2 as pb
from kvkeeper.client.arena import Arena
from kvkeeper.client.errors import KvkeeperError
from kvkeeper.vllm.adapters import Adapters
from kvkeeper.vllm.device_pages import DevicePages, list_parts
from kvkeeper.vllm.lookups import Lookups, PoolMatcher
from kvkeeper.vllm.orders import Orders, Scope
from kvkeeper.vllm.page_spec import Facts, Part, find_revision, make_spec
from kvkeeper.vllm.pages import HostPages, Pages
from kvkeeper.vllm.planner import Planner, Scheduled
from kvkeeper.vllm.rounds import Link, Rounds
from kvkeeper.vllm.settings import Settings, WrongSettings, parse_settings
from kvkeeper.vllm.transfers import Transfers

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

_MOST_SALT_CHARS = 256


@dataclass
class StepOrders(KVConnectorMetadata):
    """What the scheduler sends to the workers in a step."""

    orders: Orders


@dataclass
class RankSpec(KVConnectorHandshakeMetadata):
    """What a worker sends to the scheduler once: the KV spec of its pool."""

    spec: bytes


class KvkeeperConnector(KVConnectorBase_V1, SupportsHMA):
    """K and V of vLLM in a cache service. One object for the scheduler, and one for each worker."""

    def __init__(self, vllm_config: "VllmConfig", role: KVConnectorRole, kv_cache_config: "KVCacheConfig") -> None:
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        transfer_config = vllm_config.kv_transfer_config
        self._settings = parse_settings(transfer_config.kv_connector_extra_config, transfer_config.kv_load_failure_policy)
        _require_plain(vllm_config, kv_cache_config, self._settings)
        self._specs: list[pb.KvSpec] = []
        self._lookups: Lookups | None = None
        self._transfers: Transfers | None = None
        self._failed_blocks: set[int] = set()
        if role == KVConnectorRole.SCHEDULER:
            self._adapters = Adapters()
            self._lookups = Lookups(self._connect, self._settings.lookup_timeout_s)
            self._planner = Planner(_block_size(kv_cache_config), self._lookups, store_generated=self._settings.store_generated)

    @property
    def requires_kv_delivery(self) -> bool:
        """A store that is dropped is a miss later, and costs nothing else."""
        return False

    # The scheduler's side.

    def set_xfer_handshake_metadata_pp_aware(self, metadata: dict[tuple[int, int], KVConnectorHandshakeMetadata]) -> None:
        self._specs = [pb.KvSpec.FromString(rank.spec) for _, rank in sorted(metadata.items()) if isinstance(rank, RankSpec)]

    def set_xfer_handshake_metadata(self, metadata: dict[int, KVConnectorHandshakeMetadata]) -> None:
        self.set_xfer_handshake_metadata_pp_aware({(0, rank): pool for rank, pool in metadata.items()})

    async def _connect(self) -> PoolMatcher:
        if not self._specs:
            raise KvkeeperError(grpc.StatusCode.FAILED_PRECONDITION, message="no worker has named its pool")
        settings = self._settings
        return await PoolMatcher.connect(settings.address, self._specs, settings.lookup_timeout_s, f"vllm pid {os.getpid()}")

    def on_new_request(self, request: "Request") -> None:
        if not _has_tokens_only(request):
            return
        lora = getattr(request, "lora_request", None)
        adapter = "" if lora is None else self._adapters.digest(lora)
        if adapter is not None:
            scope = Scope(adapter, _get_salt(request))
            self._planner.arrive(request.request_id, np.array(request.prompt_token_ids, np.int32), scope)

    def get_num_new_matched_tokens(self, request: "Request", num_computed_tokens: int) -> tuple[int | None, bool]:
        self.on_new_request(request)  # does nothing the second time
        found = self._planner.match(request.request_id, num_computed_tokens)
        return found, bool(found)

    def update_state_after_alloc(self, request: "Request", blocks: "KVCacheBlocks", num_external_tokens: int) -> None:
        if num_external_tokens:
            self._planner.allocate(request.request_id, blocks.get_block_ids()[0], num_external_tokens)

    def build_connector_meta(self, scheduler_output: "SchedulerOutput") -> KVConnectorMetadata:
        preempted = getattr(scheduler_output, "preempted_req_ids", None) or ()
        return StepOrders(self._planner.step(_scheduled(scheduler_output), preempted))

    def request_finished_all_groups(
        self, request: "Request", block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished(request, block_ids[0])  # there is one group, see _require_plain

    def request_finished(self, request: "Request", block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        tokens = np.array(list(request.all_token_ids), np.int32)
        return self._planner.finish(request.request_id, tokens, request.num_computed_tokens, block_ids), None

    def update_connector_output(self, connector_output: "KVConnectorOutput") -> None:
        if connector_output.invalid_block_ids:
            self._planner.fail(connector_output.invalid_block_ids)

    # The workers' side.

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        config, settings = self._vllm_config, self._settings
        tensors, parts = list_parts(kv_caches, self._kv_cache_config.num_blocks)
        spec = make_spec(_facts(config, settings, _block_size(self._kv_cache_config), parts, next(iter(kv_caches))))
        self._specs = [spec]
        self._is_cuda = tensors[0].device.type == "cuda"

        def make_pages(arena: Arena) -> Pages:
            if self._is_cuda or arena.is_on_device:
                return DevicePages(arena, tensors, parts)
            return HostPages(arena.array, [tensor.numpy() for tensor in tensors], parts)

        def connect() -> Link:
            name = f"{spec.model_id} pid {os.getpid()}"
            return Link.connect(
                settings.address, spec, make_pages, lease_s=settings.lease_s, timeout_s=settings.call_timeout_s, name=name
            )

        self._transfers = Transfers(Rounds(connect, spec.block_size), renew_s=settings.lease_s / 3)

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        return RankSpec(self._specs[0].SerializeToString()) if self._specs else None

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        """Called before the step clears or writes the blocks of preempted requests."""
        if self._transfers is not None and isinstance(kv_connector_metadata, StepOrders):
            self._transfers.cancel_stores(kv_connector_metadata.orders.preempted)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        orders = self._orders()
        if orders.loads and self._transfers is not None:
            self._transfers.submit(Orders(loads=orders.loads), self._ready())

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Loads end between steps."""

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """Stores begin after a step."""

    def wait_for_save(self) -> None:
        orders = self._orders()
        if (orders.stores or orders.held) and self._transfers is not None:
            self._transfers.submit(Orders(stores=orders.stores, held=orders.held), self._ready())

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        if self._transfers is None:
            return None, None
        finished = self._transfers.take_finished()
        self._failed_blocks |= finished.failed_blocks
        return finished.released or None, finished.loaded or None

    def get_block_ids_with_load_errors(self) -> set[int]:
        failed, self._failed_blocks = self._failed_blocks, set()
        return failed

    def shutdown(self) -> None:
        if self._transfers is not None:
            self._transfers.close(self._settings.shutdown_s)
        if self._lookups is not None:
            self._lookups.close()

    def _orders(self) -> Orders:
        metadata = self._connector_metadata
        return metadata.orders if isinstance(metadata, StepOrders) else Orders()

    def _ready(self) -> Any:
        """What waits for the device work of now; None where all work is done when a call returns."""
        if not self._is_cuda:
            return None
        event = torch.cuda.Event()
        event.record()
        return event.synchronize


def _require_plain(config: "VllmConfig", kv_cache_config: "KVCacheConfig", settings: Settings) -> None:
    """Raises WrongSettings for what the connector cannot store rightly."""
    groups = kv_cache_config.kv_cache_groups
    if len(groups) != 1 or not isinstance(groups[0].kv_cache_spec, FullAttentionSpec):
        # Other groups forget blocks that have left their window, or keep states that are no blocks.
        text = "KvkeeperConnector serves models whose layers all keep the whole sequence; hybrid ones may be served with"
        raise WrongSettings(f"{text} --disable-hybrid-kv-cache-manager")
    if getattr(config.parallel_config, "decode_context_parallel_size", 1) > 1:
        raise WrongSettings("KvkeeperConnector does not serve context parallelism, which deals a block out to several ranks")
    if getattr(config.cache_config, "calculate_kv_scales", False):
        raise WrongSettings("KvkeeperConnector needs the K and V scales of the checkpoint: leave calculate_kv_scales off")
    if getattr(config.speculative_config, "draft_model_config", None) is not None and not settings.revision:
        raise WrongSettings('with a draft model, name both in kv_connector_extra_config, "revision": "..."')


def _has_tokens_only(request: "Request") -> bool:
    """Whether the token ids say what K and V are, for one adapter, and all of the prompt may come from a cache."""
    others = ("mm_features", "prompt_embeds", "skip_reading_prefix_cache")
    return bool(request.prompt_token_ids) and not any(_is_given(getattr(request, name, None)) for name in others)


def _is_given(value: Any) -> bool:
    return value is not None and value is not False and not (isinstance(value, list) and not value)


def _get_salt(request: "Request") -> str:
    """One that the service does not take as it is goes as its digest."""
    salt = getattr(request, "cache_salt", None) or ""
    is_plain = len(salt) <= _MOST_SALT_CHARS and salt.isprintable()
    return salt if is_plain else hashlib.sha256(salt.encode()).hexdigest()


def _scheduled(output: "SchedulerOutput") -> Iterator[Scheduled]:
    for new in output.scheduled_new_reqs:
        num_tokens = new.num_computed_tokens + output.num_scheduled_tokens[new.req_id]
        yield Scheduled(new.req_id, num_tokens, new.block_ids[0], is_whole_table=True)
    cached = output.scheduled_cached_reqs
    for request_id, added, num_computed in zip(cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True):
        num_tokens = num_computed + output.num_scheduled_tokens[request_id]
        is_resumed = request_id in cached.resumed_req_ids
        yield Scheduled(request_id, num_tokens, added[0] if added else (), is_whole_table=is_resumed)


def _block_size(kv_cache_config: "KVCacheConfig") -> int:
    """Tokens of a block of the one group that there is."""
    size: int = kv_cache_config.kv_cache_groups[0].kv_cache_spec.block_size
    return size


def _facts(config: "VllmConfig", settings: Settings, block_size: int, parts: list[Part], layer_name: str) -> Facts:
    model, hf_config = config.model_config, config.model_config.hf_config
    layer = config.compilation_config.static_forward_context.get(layer_name)
    backend = getattr(layer, "attn_backend", None)
    facts = {"config": hf_config.to_dict(), "quantization": str(model.quantization)}
    return Facts(
        model=str(model.model),
        revision=find_revision(str(model.model), getattr(hf_config, "_commit_hash", None), settings.revision),
        config=json.dumps(facts, sort_keys=True, default=str),
        dtype=str(model.dtype),
        cache_dtype=str(config.cache_config.cache_dtype),
        backend=backend.get_name() if backend is not None else "",
        block_size=block_size,
        vllm_version=vllm.__version__,
        ranks={
            name: (group.rank_in_group, group.world_size) for name, group in (("tp", get_tp_group()), ("pp", get_pp_group()))
        },
        parts=parts,
    )
