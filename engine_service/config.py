"""Configuration of the engine service: one frozen value, made here from flags over environment over defaults.

Owns every default, range and name; nothing else reads the command line or the environment. A wrong value is a
ConfigError of one line that names the flag. Does not look at the machine: whether a model can be loaded or an address
be had is found out at start.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvkeeper.service.config import (
    LOG_LEVELS,
    ConfigError,
    ConfigSource,
    check_address,
    check_choice,
    check_metrics_address,
    check_range,
    check_trace_endpoint,
    parse_switch,
)
from kvkeeper.service.sizes import parse_size

from .model.demo_model import DEMO_MODEL_DIR
from .scheduler.state.policies import POLICY_NAMES
from .scheduler.state.preemption_cost import Preemption

HASH_TOY = "hash-toy"  # value of --model for the toy whose output proves its cache; for tests

_SPECULATIONS = ("off", "prompt-look-up", "draft-model")
_PREEMPTIONS = tuple(Preemption)
_DTYPES = ("auto", "float32", "bfloat16", "float16")


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Everything that is decided before the service starts. Raises ConfigError for a value out of its range."""

    model: str = str(DEMO_MODEL_DIR)
    cache: str = "127.0.0.1:7410"
    listen: str = "127.0.0.1:7411"
    policy: str = "adaptive"
    fair_share: bool = False
    token_budget: int = 4096
    prefill_budget: int = 2048
    decode_budget: int | None = None
    max_sequences: int = 256
    chunk_size: int = 512
    block_size: int = 16
    max_tokens_per_sequence: int | None = None
    max_waiting: int = 1000
    max_results: int = 1000
    result_ttl: float = 600.0
    request_memory: int = 256 << 20
    result_memory: int = 256 << 20
    text_workers: int = 2
    text_memory: int = 512 << 20
    text_seconds: float = 5.0
    preemption: str = "auto"
    speculation: str = "off"
    draft_model: str = ""
    device: str = "cpu"
    dtype: str = "auto"
    threads: int | None = None
    lease_ms: int = 10_000
    stall_timeout: float = 300.0
    reconnect_timeout: float = 20.0
    drain_timeout: float = 5.0
    metrics_listen: str = ""  # host:port of /metrics; empty: not served
    trace_endpoint: str = ""  # URL that spans are sent to; empty: none are
    reflection: bool = True
    progress: bool = True
    log_level: str = "info"

    def __post_init__(self) -> None:
        if not self.model:
            raise ConfigError("--model: a folder with config.json, weights and tokenizer.json")
        check_address("cache", self.cache)
        check_address("listen", self.listen)
        check_metrics_address(self.metrics_listen)
        check_trace_endpoint(self.trace_endpoint)
        check_choice("policy", self.policy, POLICY_NAMES)
        check_range("token_budget", self.token_budget, 1, 1 << 20)
        check_range("prefill_budget", self.prefill_budget, 1, 1 << 20)
        if self.decode_budget is not None:
            check_range("decode_budget", self.decode_budget, 1, 1 << 12)
        check_range("max_sequences", self.max_sequences, 1, 1 << 12)  # more would not fit a Step message of 256 KiB
        check_range("chunk_size", self.chunk_size, 1, 1 << 20)
        check_range("block_size", self.block_size, 1, 1024)
        if self.max_tokens_per_sequence is not None:
            check_range("max_tokens_per_sequence", self.max_tokens_per_sequence, 2, 1 << 22)
        check_range("max_waiting", self.max_waiting, 1, 1 << 20)
        check_range("max_results", self.max_results, 1, 1 << 20)
        check_range("result_ttl", self.result_ttl, 0, 86_400)
        check_range("request_memory", self.request_memory, 1 << 20, 1 << 46)
        check_range("result_memory", self.result_memory, 1 << 20, 1 << 46)
        check_range("text_workers", self.text_workers, 1, 64)
        check_range("text_memory", self.text_memory, 64 << 20, 1 << 46)
        check_range("text_seconds", self.text_seconds, 0.1, 600)
        check_choice("preemption", self.preemption, _PREEMPTIONS)
        check_choice("speculation", self.speculation, _SPECULATIONS)
        if (self.speculation == "draft-model") != bool(self.draft_model):
            raise ConfigError("--draft-model: a folder, with --speculation draft-model and only with it")
        if self.threads is not None:
            check_range("threads", self.threads, 1, 1024)
        check_range("lease_ms", self.lease_ms, 500, 60_000)
        check_range("stall_timeout", self.stall_timeout, 0, 86_400)
        check_range("reconnect_timeout", self.reconnect_timeout, 0, 3600)
        check_range("drain_timeout", self.drain_timeout, 0, 3600)
        if re.fullmatch(r"cpu|cuda(:\d{1,3})?", self.device) is None:
            raise ConfigError(f"--device: cpu, cuda or cuda:N, not {self.device!r}")
        if self.model == HASH_TOY and self.device != "cpu":
            raise ConfigError(f"--device: {HASH_TOY} computes on a CPU")
        check_choice("dtype", self.dtype, _DTYPES)
        check_choice("log_level", self.log_level, LOG_LEVELS)


_PARSERS: dict[str, Any] = {
    "model": str,
    "cache": str,
    "listen": str,
    "policy": str,
    "fair_share": parse_switch,
    "token_budget": int,
    "prefill_budget": int,
    "decode_budget": int,
    "max_sequences": int,
    "chunk_size": int,
    "block_size": int,
    "max_tokens_per_sequence": int,
    "max_waiting": int,
    "max_results": int,
    "result_ttl": float,
    "request_memory": parse_size,
    "result_memory": parse_size,
    "text_workers": int,
    "text_memory": parse_size,
    "text_seconds": float,
    "preemption": str,
    "speculation": str,
    "draft_model": str,
    "device": str,
    "dtype": str,
    "threads": int,
    "lease_ms": int,
    "stall_timeout": float,
    "reconnect_timeout": float,
    "drain_timeout": float,
    "metrics_listen": str,
    "trace_endpoint": str,
    "reflection": parse_switch,
    "progress": parse_switch,
    "log_level": str,
}

_HELP = {
    "model": "folder of a Hugging Face model (default: the embedded demo model)",
    "cache": "address of the cache service",
    "listen": "loopback host:port, or unix:/path",
    "policy": "order in which waiting requests start: " + ", ".join(POLICY_NAMES),
    "fair_share": "of requests that a policy ranks alike, those of the tenant served least start first",
    "token_budget": "most tokens computed in a step",
    "prefill_budget": "of them, most prompt tokens",
    "decode_budget": "most sequences that decode in a step; they take turns (default: all that run)",
    "max_sequences": "most sequences in a step",
    "chunk_size": "most prompt tokens of one sequence in a step",
    "block_size": "tokens per block; engines share KV only where it is equal",
    "max_tokens_per_sequence": "most tokens of a sequence (default: what the model and the pool allow)",
    "max_waiting": "most waiting sequences; a request beyond them is refused",
    "max_results": "most ended requests of SubmitRequest whose results are kept",
    "result_ttl": "seconds that they are kept",
    "request_memory": "most bytes held for open requests, each counted as 4 KiB and four times its message (default: 256MiB)",
    "result_memory": "most bytes of kept results; the eldest are forgotten beyond them (default: 256MiB)",
    "text_workers": "most processes that work on long texts, chats and constraints; one client has all but one of them",
    "text_memory": "most memory that one text, chat or constraint may take there (default: 512MiB)",
    "text_seconds": "most seconds of a processor that it may take there",
    "preemption": "how a sequence gives its blocks back: " + ", ".join(_PREEMPTIONS) + "; auto takes what costs less time",
    "speculation": "guess next tokens and check them together: " + ", ".join(_SPECULATIONS) + "; rests where it does not pay",
    "draft_model": "folder of the model that guesses, with the same tokenizer as the model (default: none)",
    "device": "where the model computes: cpu, cuda or cuda:N; the cache service's pools have to be there too",
    "dtype": "what the model computes in: " + ", ".join(_DTYPES) + "; auto is float32 on a CPU",
    "threads": "threads of the forward pass (default: torch's)",
    "lease_ms": "lease of the session on the cache service, milliseconds",
    "stall_timeout": "seconds without progress after which a running request ends with what it gave; 0: never",
    "reconnect_timeout": "seconds that requests are kept while the cache service is away",
    "drain_timeout": "seconds that requests have to end, and clients to hear of it, once the service is asked to stop",
    "metrics_listen": "loopback host:port that serves /metrics for Prometheus (default: none)",
    "trace_endpoint": "URL of an OpenTelemetry collector, http://host:4318/v1/traces, that gets traces (default: none)",
    "reflection": "answer gRPC server reflection",
    "progress": "show a progress bar on a terminal while weights are loaded",
    "log_level": ", ".join(LOG_LEVELS),
}

_SOURCE = ConfigSource(
    EngineConfig,
    program="kvkeeper engine",
    description="The engine service: schedules requests and runs the model on the cache service's memory.",
    environment_prefix="KVKEEPER_ENGINE_",
    example="TOKEN_BUDGET=512",
    parsers=_PARSERS,
    help=_HELP,
)


def load_config(argv: Sequence[str], environ: Mapping[str, str]) -> EngineConfig:
    """Flags over KVKEEPER_ENGINE_* over defaults. Raises ConfigError; --help ends in SystemExit."""
    return _SOURCE.load(argv, environ)
