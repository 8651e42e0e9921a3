"""Configuration of the engine service: one frozen value, made here from flags over environment over defaults.

Owns every default, range and name; nothing else reads the command line or the environment. A wrong value is a
ConfigError of one line that names the flag. Does not look at the machine: whether a model can be loaded or an address
be had is found out at start.
"""

from dataclasses import dataclass
from functools import partial
from pathlib import Path

from kvkeeper.common.service.config import ConfigSource
from kvkeeper.common.service.settings import (
    DEVICE,
    TARGET_ADDRESS,
    Check,
    ConfigError,
    between,
    check_settings,
    listen_setting,
    setting,
    size_between,
)
from kvkeeper.common.trust.settings import ServiceConfig, check_targets, check_trust

from .model.checkpoint.hub_cache import newest_snapshot
from .model.demo_model import DEMO_MODEL_DIR
from .scheduler.headroom import Preemption
from .scheduler.policies import POLICY_NAMES
from .values.request import InputLimits

GATEWAY_PACKAGE = "smg_grpc_proto"  # the messages of the gateway's protocol
MAX_TOKENS = 1 << 22  # of a sequence
HASH_TOY = "hash-toy"  # value of --model for the toy whose output proves its cache; for tests

_SPECULATIONS = ("off", "prompt-look-up", "draft-model")
_DTYPES = ("auto", "float32", "bfloat16", "float16", "int8", "int4", "fp8")
_KV_DTYPES = ("auto", "fp16", "bf16", "fp8", "int8", "int4")
_CPU_KERNELS = ("auto", "compiled", "torch")


def _addresses_refusal(addresses: str) -> str | None:
    return next(filter(None, map(TARGET_ADDRESS.refusal, addresses.split(",") if addresses else ())), None)


def _name_refusal(name: str) -> str | None:
    is_name = len(name) <= 128 and name.isprintable() and not any(map(str.isspace, name))
    return None if is_name else "1 to 128 letters, digits and signs without blanks"


_model = partial(setting, group="Model")
_addresses = partial(setting, group="Addresses")
_scheduling = partial(setting, group="Scheduling")
_patience = partial(setting, group="Patience")
_bounds = partial(setting, group="Bounds")
_trust = partial(setting, group="Trust")
_watching = partial(setting, group="Watching")


@dataclass(frozen=True, slots=True)
class EngineConfig(ServiceConfig):
    """Everything that is decided before the service starts. Raises ConfigError for a value out of its range."""

    model: str = _model(
        str(DEMO_MODEL_DIR),
        "folder of a Hugging Face model",
        default_text="the embedded demo model",
        check=Check("a folder", lambda model: None if model else "a folder with config.json, weights and tokenizer.json"),
        parse=newest_snapshot,
    )
    model_name: str = _model(
        "",
        "what clients call the model",
        default_text="the folder's name, or ORG/NAME of a hub's snapshot",
        check=Check("1 to 128 letters, digits and signs without blanks, or empty", _name_refusal),
        details="It says nothing of what is cached: engines share K and V of one model under different names.",
    )
    cache: str = _addresses("127.0.0.1:7410", "address of the cache service", check=TARGET_ADDRESS)
    listen: str = listen_setting("127.0.0.1:7411")
    fronts: int = _addresses(
        1,
        "processes that serve clients' streams, so that the engine's loop has time for steps; 0: the loop serves them",
        check=between(0, 64),
        details="They listen at --listen, make text of tokens, find stop strings and write streams. A Unix socket takes one. A"
        " front that dies is started again; its streams end, and what was submitted goes on.",
    )
    role: str = _addresses(
        "both",
        "what this engine computes: whole requests, prompts of other engines' requests, or both",
        choices=("both", "prefill", "decode"),
        details="prefill: refuses requests of clients. decode: computes no prompts for others, and has its own long prompts"
        " computed by the engines of --prefill. All of them are on one cache service, and no K or V is copied.",
    )
    prefill: str = _addresses(
        "",
        "addresses of the engines that compute long prompts for this one, with commas between them",
        default_text="none",
        check=Check("host:port or unix:/path, with commas between them, or empty", _addresses_refusal),
        details="With --role decode, and only with it. The one with the fewest of them is asked. Where none is ready, or it"
        " fails, the prompt is computed here.",
    )
    prefill_min_tokens: int = _scheduling(
        512,
        "fewest tokens of a prompt that another engine is asked for",
        check=between(1, 1 << 22, "tokens"),
        details="With --prefill.",
    )
    prefill_timeout: float = _patience(
        30.0,
        "seconds that a prompt may take in another engine before it is computed here",
        check=between(0.1, 3600, "seconds"),
        details="With --prefill.",
    )
    step_carrier: str = _addresses(
        "auto",
        "what steps reach the cache service on; auto takes a socket of this host where the cache service has one to give",
        choices=("auto", "grpc"),
        details="Over that socket a step costs about two thirds. Where it breaks, steps go on over gRPC in the same session.",
    )
    policy: str = _scheduling(
        "adaptive",
        "order in which waiting requests start",
        choices=POLICY_NAMES,
        details="fcfs is order of arrival, sjf shortest job first, priority grows with the time waited; adaptive takes one of"
        " them by the load.",
    )
    fair_share: bool = _scheduling(False, "of requests that a policy ranks alike, those of the tenant served least start first")
    token_budget: int = _scheduling(4096, "most tokens computed in a step", check=between(1, 1 << 20, "tokens"))
    prefill_budget: int = _scheduling(2048, "most prompt tokens computed in a step", check=between(1, 1 << 20, "tokens"))
    decode_budget: int | None = _scheduling(
        None, "most sequences that decode in a step; they take turns", default_text="all that run", check=between(1, 1 << 12)
    )
    client_shares: bool = _scheduling(
        True,
        "clients share the time of steps",
        details="Where several clients decode, a step takes no longer than all of them would one after the other: the many"
        " sequences of a client take turns beside the few of another. A client's prompts take no more time than the decodes of"
        " others beside them. Of requests that a policy ranks alike, those of the connection served least start first. One"
        " client alone has all. Where sequences cost little beside a step's fixed time, as on a GPU, all decode in each.",
    )
    max_sequences: int = _scheduling(256, "most sequences in a step", check=between(1, 1 << 16))
    chunk_size: int | None = _scheduling(
        None,
        "most prompt tokens of one sequence in a step",
        check=between(1, 1 << 20, "tokens"),
        default_text="512, and 2048 with --device cuda",
    )
    block_size: int = _model(16, "tokens per block; engines share KV only where it is equal", check=between(1, 1024, "tokens"))
    max_tokens_per_sequence: int | None = _bounds(
        None,
        "most tokens of a sequence",
        default_text="what the model and the pool allow",
        check=between(2, MAX_TOKENS, "tokens"),
    )
    max_waiting: int = _bounds(
        1000,
        "most waiting sequences; a request beyond them is refused, and one of a client that has nine tenths of them",
        check=between(1, 1 << 20),
    )
    max_results: int = _bounds(1000, "most ended requests of SubmitRequest whose results are kept", check=between(1, 1 << 20))
    result_ttl: float = _bounds(600.0, "seconds that results of ended requests are kept", check=between(0, 86_400, "seconds"))
    request_memory: int = _bounds(
        256 << 20,
        "most bytes held for open requests, each counted as 4 KiB and four times its message",
        check=size_between(1 << 20, 1 << 46),
        details="A request beyond them is told to come again.",
    )
    result_memory: int = _bounds(
        256 << 20, "most bytes of kept results; the oldest are forgotten beyond them", check=size_between(1 << 20, 1 << 46)
    )
    receive_memory: int = _bounds(
        32 << 20,
        "most memory for messages that are on their way in, 4 MiB for each or more; one connection has a quarter of it",
        check=size_between(4 << 20, 1 << 40),
        details="Further calls wait for their turn, and connections take turns. Health checks have places of their own. Where a"
        " prompt may have more than 825,000 tokens, a message may have more than 4 MiB.",
    )
    receive_seconds: float = _bounds(
        10.0, "seconds in which a call's message has to come once it is its turn", check=between(0.1, 600, "seconds")
    )
    connection_calls: int = _bounds(
        1024, "most calls of one connection at once; a client's further ones wait on its side", check=between(1, 1 << 20)
    )
    many_calls: int = _bounds(
        16,
        "most GenerateMany calls at once, each with 4 MiB or more on their way in; one connection has a quarter of them",
        check=between(1, 4096),
        details="A client that gets none sends its requests in calls of their own.",
    )
    connections: int = _bounds(1024, "most connections; further ones are closed", check=between(2, 1 << 20))
    intake_percent: int = _bounds(
        25,
        "percent of the time in which calls are taken in while steps are computed; others wait, by turns of connections",
        check=between(1, 100, "percent"),
        details="Streams go on, however many calls come at once. A step takes in one at least. Idle, an engine takes all.",
    )
    text_workers: int = _bounds(
        2,
        "most processes that work on long texts, chats and constraints; one client has all but one of them",
        check=between(1, 64),
        details="Short chats have one more for themselves.",
    )
    text_memory: int = _bounds(
        512 << 20,
        "most memory that one text, chat or constraint may take in a text worker",
        check=size_between(64 << 20, 1 << 46),
        details="What takes more is refused.",
    )
    text_seconds: float = _bounds(
        5.0,
        "most seconds of a processor that one text, chat or constraint may take in a text worker",
        check=between(0.1, 600, "seconds"),
        details="What takes more is refused.",
    )
    max_text_bytes: int = _bounds(
        1 << 20,
        "most bytes of a text, or of the contents of a chat",
        check=size_between(1 << 10, 4 << 20),
        details="Less where a sequence has few tokens: 32 bytes for each. What has more is refused before it is tokenised.",
    )
    max_constraint_bytes: int = _bounds(
        64 << 10,
        "most bytes of a JSON schema, of a regular expression, or of all choices together",
        check=size_between(1 << 10, 1 << 20),
        details="What has more is refused before it is compiled.",
    )
    max_stop_strings: int = _bounds(16, "most stop strings of a request", check=between(0, 256))
    max_stop_bytes: int = _bounds(256, "most bytes of one stop string", check=between(1, 4096, "bytes"))
    preemption: str = _scheduling(
        "auto",
        "how a sequence gives its blocks back, where auto takes what costs less time",
        choices=tuple(Preemption),
        details="recompute forgets its K and V and computes them again; swap moves them to the host tier and back; auto goes by"
        " what was measured.",
    )
    speculation: str = _model(
        "off",
        "guess next tokens and check them together, resting where it does not pay",
        choices=_SPECULATIONS,
        details="The tokens are the same (but where rounding tips a draw), in fewer steps.",
    )
    draft_model: str = _model(
        "",
        "folder of the model that guesses, with the same tokenizer as the model",
        default_text="none",
        check=Check("a folder, or empty", lambda _: None, parse=newest_snapshot),
        details="With --speculation draft-model, and only with it.",
    )
    device: str = _model(
        "cpu", "where the model computes: cpu, cuda or cuda:N; the cache service's pools have to be there too", check=DEVICE
    )
    dtype: str = _model(
        "auto",
        "what the model computes in, where auto is the dtype of its weights, and on a CPU mostly float32",
        choices=_DTYPES,
        details="On a CPU auto is bfloat16 where weights are, the processor multiplies it (AVX512 BF16), the extra cpu is"
        " there and K and V are stored as computed, else float32. int8, int4: weights of products are integers; all else is as"
        " auto on CUDA, and float32 on a CPU, with the extra cpu. fp8, on CUDA: products are of 8-bit floats, all else bf16.",
    )
    kv_dtype: str = _model(
        "auto",
        "what K and V are stored in, where auto is what the model computes in",
        choices=_KV_DTYPES,
        details="fp8, int8 and int4 have a scale for each token and KV head. Native families. Requests with sink and window are"
        " refused with anything but auto, and layers with windows keep all tokens.",
    )
    kv_tail_tokens: int = _model(
        256,
        "most of a sequence's newest tokens, in whole blocks, that are also kept as the model computes them; 0: none",
        check=between(0, 1 << 20, "tokens"),
        details="With --kv-dtype fp8, int8 or int4. Not with --role prefill or decode: there all tokens are read as they are"
        " stored.",
    )
    cpu_kernels: str = _model(
        "auto",
        "how a CPU computes: with kernels compiled for it, or with torch",
        choices=_CPU_KERNELS,
        details="The compiled ones are for float32, bfloat16, int8 and int4, and need the extra cpu; auto takes them where"
        " it is installed.",
    )
    graphs: bool = _model(
        True,
        "capture steps as CUDA graphs, which spares the host most of a step",
        details="On a CUDA device, and native families. Captured at start, after a run of every kernel, and when the arena is"
        " mapped anew. Steps with over 2,048 tokens of prompts (512 with FlashInfer), or sink and window, go without. Several"
        " ranks capture at once; what one of them cannot capture, none has.",
    )
    flashinfer: bool = _model(
        True,
        "on a CUDA device, prompts are attended by FlashInfer where the extra flashinfer is installed and serves the model",
    )
    overlap: bool = _model(
        True,
        "launch a step before the tokens of the one before it are read",
        details="A sequence that ends unforeseen, by a stop token, a stop string or a cancellation, has then been computed for"
        " one token more, which no client sees. Steps wait for those before them beside constrained outputs, guesses and beam"
        " searches, while blocks are short, and where sequences move between tiers.",
    )
    groups: bool = _model(
        True,
        "keep only the window or chunk of layers that have one, in block tables of their own",
        details="For native families with sliding windows or chunks in some layers and none in others; others are served as"
        " without, and so are all by a cache service that knows no such tables.",
    )
    checkpoint_tokens: int = _model(
        8192,
        "of models with recurrent layers, tokens from one state that is kept to the next",
        check=between(1, 1 << 20, "tokens"),
        details="In whole blocks, and one block at least. A prefix hit ends at such a state, or at one that is kept where a"
        " sequence ended or prompts part. Each of them takes a block of every group of recurrent layers. Engines share KV"
        " only where it is equal.",
    )
    tensor_parallel: int = _model(
        1,
        "processes that share the model, each with a part of its heads and of its weights",
        check=between(1, 64),
        details="For native families. The number divides the heads and widths of the model. On CUDA devices rank r is on the"
        " device r behind that of --device, and so are the pools of the cache service. --pool-memory of the cache service is of"
        " each rank.",
    )
    rank_timeout: float = _patience(
        60.0,
        "seconds that one rank waits for another before that counts as lost",
        check=between(1, 3600, "seconds"),
        details="With --tensor-parallel. All ranks are then started anew, and requests go on from the tokens that they hold.",
    )
    threads: int | None = _model(
        None, "threads of the forward pass, of each rank", default_text="torch's, divided by the ranks", check=between(1, 1024)
    )
    lease_ms: int = _patience(
        10_000, "lease of the session on the cache service, milliseconds", check=between(500, 60_000, "milliseconds")
    )
    stall_timeout: float = _patience(
        300.0,
        "seconds without progress after which a running request ends with what it gave; 0: never",
        check=between(0, 86_400, "seconds"),
    )
    reconnect_timeout: float = _patience(
        20.0,
        "seconds that requests are kept while the cache service is away",
        check=between(0, 3600, "seconds"),
        details="Each answer of it is waited for as long, but for 10 seconds or more and 60 or less. Then requests go on where"
        " they were.",
    )
    take_over: str = _addresses(
        "",
        "address of an engine whose requests this one goes on with, once it is ready itself",
        default_text="none",
        check=Check("host:port, unix:/path, or empty", lambda address: TARGET_ADDRESS.refusal(address) if address else None),
        details="That engine then stops. It has to serve the same model. Where none answers, there is nothing to take over.",
    )
    stream_interval_ms: float = _scheduling(
        16,
        "least milliseconds between two messages of a stream; 0: a message for each token, however many streams there are",
        check=between(0, 1000, "milliseconds"),
        details="What comes meanwhile is one message. The first token and the end are sent at once. Many streams are sent "
        "messages less often, so that this takes half of the loop's time at most.",
    )
    client_grace: float = _patience(
        10.0, "seconds that a stream which was taken over waits here for its client", check=between(0, 3600, "seconds")
    )
    drain_timeout: float = _patience(
        5.0,
        "seconds that requests have to end, and clients to hear of it, once the service is asked to stop",
        check=between(0, 3600, "seconds"),
    )
    cache_tls_ca: Path | None = _trust(
        None,
        "file with the authority in PEM that signs the certificate of the cache service, which switches TLS on",
        default_text="no TLS",
        details="It goes for the engines of --prefill and --take-over as well. Unix sockets do without.",
    )
    cache_tls_cert: Path | None = _trust(
        None,
        "file with the certificate in PEM that this engine shows the cache service and other engines",
        default_text="none",
        details="With --cache-tls-key and --cache-tls-ca.",
    )
    cache_tls_key: Path | None = _trust(None, "file with the key of --cache-tls-cert in PEM", default_text="none")
    cache_token_file: Path | None = _trust(
        None,
        "file with the token that this engine shows the cache service and other engines",
        default_text="none",
        details="Its role is engine, its tenant *. A file that changes is read again.",
    )
    vllm_metrics: bool = _watching(
        False,
        "tell metrics under vLLM's names, too, where both mean the same",
        details="For dashboards and autoscalers that were made for vLLM.",
    )
    gateway: str = _addresses(
        "auto",
        "speak vllm.grpc.engine.VllmEngine, too, for gateways that speak HTTP with clients",
        choices=("auto", "on", "off"),
        details="auto: where the extra `gateway` is installed.",
    )
    progress: bool = _model(True, "show a progress bar on a terminal while weights are loaded")

    @property
    def input_limits(self) -> InputLimits:
        return InputLimits(self.max_text_bytes, self.max_constraint_bytes, self.max_stop_strings, self.max_stop_bytes)

    @property
    def prefill_targets(self) -> list[str]:
        return self.prefill.split(",") if self.prefill else []

    def __post_init__(self) -> None:
        check_settings(self)
        check_trust(self)
        if self.fronts > 1 and self.listen.startswith("unix:"):
            raise ConfigError("--fronts: a Unix socket takes one front; --listen host:port takes more")
        if self.prefill and self.role != "decode":
            raise ConfigError("--prefill: with --role decode, and only with it")
        if (self.speculation == "draft-model") != bool(self.draft_model):
            raise ConfigError("--draft-model: a folder, with --speculation draft-model and only with it")
        for flag, addresses in (
            ("--cache", [self.cache]),
            ("--prefill", self.prefill_targets),
            ("--take-over", [self.take_over] if self.take_over else []),
        ):
            check_targets(flag, addresses, self.cache_tls_ca, "--cache-tls-ca")
        if (self.cache_tls_cert is None) != (self.cache_tls_key is None):
            raise ConfigError("--cache-tls-cert: goes with --cache-tls-key, and the other way round")
        if self.cache_tls_cert is not None and self.cache_tls_ca is None:
            raise ConfigError("--cache-tls-cert: goes with --cache-tls-ca, which is missing")
        if self.model == HASH_TOY and self.kv_dtype != "auto":
            raise ConfigError(f"--kv-dtype: {HASH_TOY} stores what it computes")
        if self.model == HASH_TOY and self.device != "cpu":
            raise ConfigError(f"--device: {HASH_TOY} computes on a CPU")


def get_dtype(config: EngineConfig) -> str:
    """What --dtype asks for; on a CPU the kernels of K and V that are stored in another format compute in float32 alone."""
    is_stored = config.kv_dtype != "auto" and config.device == "cpu"
    return "float32" if config.dtype == "auto" and is_stored else config.dtype


def wants_compiled(config: EngineConfig) -> bool:
    """Whether the compiled kernels of a CPU have something to do for this config."""
    serves = config.device == "cpu" and config.dtype != "float16" and config.model != HASH_TOY
    return serves and config.cpu_kernels != "torch"


SOURCE = ConfigSource(
    EngineConfig,
    program="kvkeeper engine",
    description="The engine service: schedules requests and runs the model on the cache service's memory.",
    environment_prefix="KVKEEPER_ENGINE_",
    example="TOKEN_BUDGET=512",
)
