"""VllmEngine's methods, on the methods of our own service.

A gateway says that a client has gone by Abort, or by ending the call; both end the request. One that is unknown by then has
ended already, which is no error.
"""

import contextlib
import hashlib
import io
import json
import time
import zipfile
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path

from smg_grpc_proto.generated import common_pb2
from smg_grpc_proto.generated import vllm_engine_pb2 as pb

from kvkeeper.common.service import VERSION
from kvkeeper.common.service.threads import in_thread
from kvkeeper.engine.v1 import engine_service_pb2 as own

from ...config import EngineConfig
from ...loop.engine import Engine
from ...values.errors import NotImplementedYet, UnknownRequest
from ...values.sampling_params import NEUTRAL, SamplingParams
from ..ownership import known_id, own_tenant
from ..service import EngineService
from . import kv_events
from .requests import own_id, require_only_rank

CHUNK_BYTES = 64 << 10
_NAMES = frozenset({
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "config.json",
    "generation_config.json",
    "merges.txt",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
})  # fmt: skip


@dataclass(frozen=True, slots=True)
class Archive:
    """A zip file, with the SHA-256 of its bytes in hex: a model's tokenizer, for a gateway that makes tokens of texts itself.

    Read once, when the first gateway asks. No weights, and no other file than those that tokenizers are made of.
    """

    data: bytes
    sha256: str

    def chunks(self) -> Iterator[tuple[bytes, str]]:
        """Its bytes in order, and with the last of them the digest."""
        for start in range(0, len(self.data), CHUNK_BYTES):
            is_last = start + CHUNK_BYTES >= len(self.data)
            yield self.data[start : start + CHUNK_BYTES], self.sha256 if is_last else ""


def make_archive(folder: Path) -> Archive:
    """The archive of a model's folder; the same bytes for the same files."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        for path in sorted(folder.iterdir()):
            if path.name in _NAMES and path.is_file():
                archive.writestr(zipfile.ZipInfo(path.name), path.read_bytes(), zipfile.ZIP_DEFLATED)
    data = out.getvalue()
    return Archive(data, hashlib.sha256(data).hexdigest())


_SERVER_TYPE = "kvkeeper"
# A gateway reads a tokenizer from this path, where it has such a file. Where it has none, it takes the path for a name and
# asks a hub for it. Where the file holds no tokenizer, it asks the engine. This one is on every host, and holds none.
_NO_PATH = "/dev/null"
_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")  # the model's, that a gateway puts into requests


class VllmEngine:
    """One method per call that fronts forward, in snake case; their engine finds them by name."""

    def __init__(self, config: EngineConfig, service: EngineService, engine: Engine, *, has_tokenizer: bool) -> None:
        self._config = config
        self._service = service
        self._engine = engine
        self._has_tokenizer = has_tokenizer
        self._archive: Archive | None = None

    async def abort(self, request: pb.AbortRequest) -> pb.AbortResponse:
        for request_id in request.request_ids:
            with contextlib.suppress(UnknownRequest):
                self._engine.requests.cancel(known_id(own_id(request_id)))
        return pb.AbortResponse()

    async def health_check(self, request: pb.HealthCheckRequest) -> pb.HealthCheckResponse:
        if self._engine.is_stopping:
            return pb.HealthCheckResponse(healthy=False, message="the engine is asked to stop")
        if self._engine.memory is None:
            return pb.HealthCheckResponse(healthy=False, message="the engine has no session with the cache service")
        return pb.HealthCheckResponse(healthy=True)

    async def get_model_info(self, request: pb.GetModelInfoRequest) -> pb.GetModelInfoResponse:
        model = await self._service.get_model(own.GetModelRequest())
        return pb.GetModelInfoResponse(
            model_path=_NO_PATH,
            tokenizer_path=_NO_PATH,
            served_model_name=model.model_id,
            is_generation=True,
            max_context_length=model.max_tokens_per_sequence,
            max_req_input_len=model.max_tokens_per_sequence - 1,
            vocab_size=model.vocab_size,
            architectures=[model.architecture],
            eos_token_ids=model.eos_token_ids,
            default_sampling_params_json=_dump_defaults(self._service.sampling_defaults),
        )

    async def get_server_info(self, request: pb.GetServerInfoRequest) -> pb.GetServerInfoResponse:
        stats = await self._service.get_stats(own.GetStatsRequest())
        return pb.GetServerInfoResponse(
            server_type=_SERVER_TYPE,
            active_requests=stats.num_running_requests + stats.num_waiting_requests,
            uptime_seconds=stats.uptime_seconds,
            data_parallel_size=1,
            block_size=self._config.block_size,
            constrained_decoding_start="first_token",
        )

    async def get_loads(self, request: pb.GetLoadsRequest) -> pb.GetLoadsResponse:
        require_only_rank("dp_rank", request.dp_rank)
        stats = await self._service.get_stats(own.GetStatsRequest())
        memory = self._engine.memory
        num_tokens = memory.session.pool.num_blocks * self._config.block_size if memory is not None else 0
        load = pb.SchedulerLoad(
            num_running_reqs=stats.num_running_requests,
            num_waiting_reqs=stats.num_waiting_requests,
            num_total_reqs=stats.num_running_requests + stats.num_waiting_requests,
            num_used_tokens=round(num_tokens * stats.kv_utilization),
            max_total_num_tokens=num_tokens,
            token_usage=stats.kv_utilization,
            utilization=stats.batch_utilization,
        )
        return pb.GetLoadsResponse(
            timestamp=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), version=VERSION, dp_rank_count=1, loads=[load]
        )

    def subscribe_kv_events(self, request: common_pb2.SubscribeKvEventsRequest) -> AsyncIterator[common_pb2.KvEventBatch]:
        return kv_events.batches(self._engine, own_tenant(""), request.start_sequence_number)

    async def get_tokenizer(self, request: common_pb2.GetTokenizerRequest) -> AsyncIterator[common_pb2.GetTokenizerChunk]:
        if not self._has_tokenizer:
            raise NotImplementedYet("this model has no tokenizer", feature="tokenizer")
        if self._archive is None:
            self._archive = await in_thread(make_archive, Path(self._config.model))
        for data, sha256 in self._archive.chunks():
            yield common_pb2.GetTokenizerChunk(data=data, sha256=sha256)


def _dump_defaults(sampling: SamplingParams) -> str:
    """The model's defaults that a gateway puts into requests, as JSON; empty where it has none of its own."""
    own_ones = {name: value for name in _DEFAULTS if (value := getattr(sampling, name)) != getattr(NEUTRAL, name)}
    return json.dumps(own_ones) if own_ones else ""
