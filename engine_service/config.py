"""Configuration of the engine service: one frozen value, made here from flags over environment over defaults.

Owns every default, range and name; nothing else reads the command line or the environment. A wrong value is a
ConfigError of one line that names the flag. Does not look at the machine: whether a model can be loaded or an address
be had is found out at start.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvkeeper.common.service.config import ConfigSource
from kvkeeper.common.service.settings import (
    DEVICE,
    TARGET_ADDRESS,
    Check,
    ConfigError,
    between,
    check_settings,
    health_address_setting,
    listen_setting,
    log_level_setting,
    metrics_listen_setting,
    reflection_setting,
    setting,
    size_between,
    trace_endpoint_setting,
)
from kvkeeper.common.service.sizes import parse_size
from kvkeeper.common.trust.settings import (
    auth_tokens_setting,
    check_targets,
    check_trust,
    tls_cert_setting,
    tls_client_ca_setting,
    tls_key_setting,
)

from .model.demo_model import DEMO_MODEL_DIR
from .scheduler.state.policies import POLICY_NAMES
from .scheduler.state.preemption_cost import Preemption
from .values.input_limits import InputLimits

GATEWAY_PACKAGE = "smg_grpc_proto"  # the messages of the gateway's protocol
MAX_TOKENS = 1 << 22  # of a sequence
HASH_TOY = "hash-toy"  # value of --model for the toy whose output proves its cache; for tests

_SPECULATIONS = ("off", "prompt-look-up", "draft-model")
_DTYPES = ("auto", "float32", "bfloat16", "float16", "int8")
_KV_DTYPES = ("auto", "fp16", "bf16", "fp8", "int8", "int4")
_CPU_KERNELS = ("auto", "compiled", "torch")


def _addresses_refusal(addresses: str) -> str | None:
    return next(filter(None, map(TARGET_ADDRESS.refusal, addresses.split(",") if addresses else ())), None)


def _name_refusal(name: str) -> str | None:
    is_name = len(name) <= 128 and name.isprintable() and not any(map(str.isspace, name))
    return None if is_name else "1 to 128 letters, digits and signs without blanks"


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Everything that is decided before the service starts. Raises ConfigError for a value out of its range."""

    model: str = setting(
        str(DEMO_MODEL_DIR),
        group="Model",
        help="folder of a Hugging Face model",
        default_text="the embedded demo model",
        check=Check("a folder", lambda model: None if model else "a folder with config.json, weights and tokenizer.json"),
    )
    model_name: str = setting(
        "",
        group="Model",
        help="what clients call the model",
        default_text="the folder's name, or ORG/NAME of a hub's snapshot",
        check=Check("1 to 128 letters, digits and signs without blanks, or empty", _name_refusal),
        details="It says nothing of what is cached: engines share K and V of one model under different names.",
    )
    cache: str = setting("127.0.0.1:7410", group="Addresses", help="address of the cache service", check=TARGET_ADDRESS)
    listen: str = listen_setting("127.0.0.1:7411")
    fronts: int = setting(
        1,
        group="Addresses",
        help="processes that serve clients' streams, so that the engine's loop has time for steps; 0: the loop serves them",
        check=between(0, 64),
        details="They listen at --listen, make text of tokens, find stop strings and write streams. A Unix socket takes one. A"
        " front that dies is started again; its streams end, and what was submitted goes on.",
    )
    role: str = setting(
        "both",
        group="Addresses",
        help="what this engine computes: whole requests, prompts of other engines' requests, or both",
        choices=("both", "prefill", "decode"),
        details="prefill: refuses requests of clients. decode: computes no prompts for others, and has its own long prompts"
        " computed by the engines of --prefill. All of them are on one cache service, and no K or V is copied.",
    )
    prefill: str = setting(
        "",
        group="Addresses",
        help="addresses of the engines that compute long prompts for this one, with commas between them",
        default_text="none",
        check=Check("host:port or unix:/path, with commas between them, or empty", _addresses_refusal),
        details="With --role decode, and only with it. The one with the fewest of them is asked. Where none is ready, or it"
        " fails, the prompt is computed here.",
    )
    prefill_min_tokens: int = setting(
        512,
        group="Scheduling",
        help="fewest tokens of a prompt that another engine is asked for",
        check=between(1, 1 << 22),
        unit="tokens",
        details="With --prefill.",
    )
    prefill_timeout: float = setting(
        30.0,
        group="Patience",
        help="seconds that a prompt may take in another engine before it is computed here",
        check=between(0.1, 3600),
        unit="seconds",
        details="With --prefill.",
    )
    step_carrier: str = setting(
        "auto",
        group="Addresses",
        help="what steps reach the cache service on; auto takes a socket of this host where the cache service has one to give",
        choices=("auto", "grpc"),
        details="Over that socket a step costs less than half. Where it breaks, steps go on over gRPC in the same session.",
    )
    policy: str = setting(
        "adaptive",
        group="Scheduling",
        help="order in which waiting requests start",
        choices=POLICY_NAMES,
        details="fcfs is order of arrival, sjf shortest job first, priority grows with the time waited; adaptive takes one of"
        " them by the load.",
    )
    fair_share: bool = setting(
        False,
        group="Scheduling",
        help="of requests that a policy ranks alike, those of the tenant served least start first",
    )
    token_budget: int = setting(
        4096, group="Scheduling", help="most tokens computed in a step", check=between(1, 1 << 20), unit="tokens"
    )
    prefill_budget: int = setting(
        2048, group="Scheduling", help="most prompt tokens computed in a step", check=between(1, 1 << 20), unit="tokens"
    )
    decode_budget: int | None = setting(
        None,
        group="Scheduling",
        help="most sequences that decode in a step; they take turns",
        default_text="all that run",
        check=between(1, 1 << 12),
    )
    client_shares: bool = setting(
        True,
        group="Scheduling",
        help="clients share the time of steps",
        details="Where several clients decode, a step takes no longer than all of them would one after the other: the many"
        " sequences of a client take turns beside the few of another. A client's prompts take no more time than the decodes of"
        " others beside them. Of requests that a policy ranks alike, those of the connection served least start first. One"
        " client alone has all. Where sequences cost little beside a step's fixed time, as on a GPU, all decode in each.",
    )
    max_sequences: int = setting(
        256,
        group="Scheduling",
        help="most sequences in a step",
        check=between(1, 1 << 16),
    )
    chunk_size: int = setting(
        512,
        group="Scheduling",
        help="most prompt tokens of one sequence in a step",
        check=between(1, 1 << 20),
        unit="tokens",
    )
    block_size: int = setting(
        16,
        group="Model",
        help="tokens per block; engines share KV only where it is equal",
        check=between(1, 1024),
        unit="tokens",
    )
    max_tokens_per_sequence: int | None = setting(
        None,
        group="Bounds",
        help="most tokens of a sequence",
        default_text="what the model and the pool allow",
        check=between(2, MAX_TOKENS),
        unit="tokens",
    )
    max_waiting: int = setting(
        1000,
        group="Bounds",
        help="most waiting sequences; a request beyond them is refused, and one of a client that has nine tenths of them",
        check=between(1, 1 << 20),
    )
    max_results: int = setting(
        1000,
        group="Bounds",
        help="most ended requests of SubmitRequest whose results are kept",
        check=between(1, 1 << 20),
    )
    result_ttl: float = setting(
        600.0, group="Bounds", help="seconds that results of ended requests are kept", check=between(0, 86_400), unit="seconds"
    )
    request_memory: int = setting(
        256 << 20,
        group="Bounds",
        help="most bytes held for open requests, each counted as 4 KiB and four times its message",
        parse=parse_size,
        check=size_between(1 << 20, 1 << 46),
        details="A request beyond them is told to come again.",
    )
    result_memory: int = setting(
        256 << 20,
        group="Bounds",
        help="most bytes of kept results; the oldest are forgotten beyond them",
        parse=parse_size,
        check=size_between(1 << 20, 1 << 46),
    )
    receive_memory: int = setting(
        32 << 20,
        group="Bounds",
        help="most memory for messages that are on their way in, 4 MiB for each or more; one connection has a quarter of it",
        parse=parse_size,
        check=size_between(4 << 20, 1 << 40),
        details="Further calls wait for their turn, and connections take turns. Health checks have places of their own. Where a"
        " prompt may have more than 825,000 tokens, a message may have more than 4 MiB.",
    )
    receive_seconds: float = setting(
        10.0,
        group="Bounds",
        help="seconds in which a call's message has to come once it is its turn",
        check=between(0.1, 600),
        unit="seconds",
    )
    connection_calls: int = setting(
        1024,
        group="Bounds",
        help="most calls of one connection at once; a client's further ones wait on its side",
        check=between(1, 1 << 20),
    )
    many_calls: int = setting(
        16,
        group="Bounds",
        help="most GenerateMany calls at once, each with 4 MiB or more on their way in; one connection has a quarter of them",
        check=between(1, 4096),
        details="A client that gets none sends its requests in calls of their own.",
    )
    connections: int = setting(
        1024, group="Bounds", help="most connections; further ones are closed", check=between(2, 1 << 20)
    )
    intake_percent: int = setting(
        25,
        group="Bounds",
        help="percent of the time in which calls are taken in while steps are computed; others wait, by turns of connections",
        check=between(1, 100),
        details="Streams go on, however many calls come at once. A step takes in one at least. Idle, an engine takes all.",
        unit="percent",
    )
    text_workers: int = setting(
        2,
        group="Bounds",
        help="most processes that work on long texts, chats and constraints; one client has all but one of them",
        check=between(1, 64),
        details="Short chats have one more for themselves.",
    )
    text_memory: int = setting(
        512 << 20,
        group="Bounds",
        help="most memory that one text, chat or constraint may take in a text worker",
        parse=parse_size,
        check=size_between(64 << 20, 1 << 46),
        details="What takes more is refused.",
    )
    text_seconds: float = setting(
        5.0,
        group="Bounds",
        help="most seconds of a processor that one text, chat or constraint may take in a text worker",
        check=between(0.1, 600),
        unit="seconds",
        details="What takes more is refused.",
    )
    max_text_bytes: int = setting(
        1 << 20,
        group="Bounds",
        help="most bytes of a text, or of the contents of a chat",
        parse=parse_size,
        check=size_between(1 << 10, 4 << 20),
        details="Less where a sequence has few tokens: 32 bytes for each. What has more is refused before it is tokenised.",
    )
    max_constraint_bytes: int = setting(
        64 << 10,
        group="Bounds",
        help="most bytes of a JSON schema, of a regular expression, or of all choices together",
        parse=parse_size,
        check=size_between(1 << 10, 1 << 20),
        details="What has more is refused before it is compiled.",
    )
    max_stop_strings: int = setting(16, group="Bounds", help="most stop strings of a request", check=between(0, 256))
    max_stop_bytes: int = setting(
        256, group="Bounds", help="most bytes of one stop string", check=between(1, 4096), unit="bytes"
    )
    preemption: str = setting(
        "auto",
        group="Scheduling",
        help="how a sequence gives its blocks back, where auto takes what costs less time",
        choices=tuple(Preemption),
        details="recompute forgets its K and V and computes them again; swap moves them to the host tier and back; auto goes by"
        " what was measured.",
    )
    speculation: str = setting(
        "off",
        group="Model",
        help="guess next tokens and check them together, resting where it does not pay",
        choices=_SPECULATIONS,
        details="The tokens are the same (but where rounding tips a draw), in fewer steps.",
    )
    draft_model: str = setting(
        "",
        group="Model",
        help="folder of the model that guesses, with the same tokenizer as the model",
        default_text="none",
        check=Check("a folder, or empty", lambda _: None),
        details="With --speculation draft-model, and only with it.",
    )
    device: str = setting(
        "cpu",
        group="Model",
        help="where the model computes: cpu, cuda or cuda:N; the cache service's pools have to be there too",
        check=DEVICE,
    )
    dtype: str = setting(
        "auto",
        group="Model",
        help="what the model computes in, where auto is float32 on a CPU",
        choices=_DTYPES,
        details="int8, on a CPU: the matrix products are of 8-bit integers, two to three times as fast and less exact; all else"
        " is float32.",
    )
    kv_dtype: str = setting(
        "auto",
        group="Model",
        help="what K and V are stored in, where auto is what the model computes in",
        choices=_KV_DTYPES,
        details="fp8, int8 and int4 have a scale for each token and KV head. Native families. Requests with sink and window are"
        " refused with anything but auto, and layers with windows keep all tokens.",
    )
    kv_tail_tokens: int = setting(
        256,
        group="Model",
        help="most of a sequence's newest tokens, in whole blocks, that are also kept as the model computes them; 0: none",
        check=between(0, 1 << 20),
        unit="tokens",
        details="With --kv-dtype fp8, int8 or int4. Not with --role prefill or decode: there all tokens are read as they are"
        " stored.",
    )
    cpu_kernels: str = setting(
        "auto",
        group="Model",
        help="how a CPU computes all but the matrix products: with kernels compiled for it, or with torch",
        choices=_CPU_KERNELS,
        details="The compiled ones are for float32 and int8, and need the extra cpu; auto takes them where it is installed.",
    )
    graphs: bool = setting(
        True,
        group="Model",
        help="capture decodes as CUDA graphs, which spares the host most of a step; without effect on several ranks",
        details="On a CUDA device, and native families. Graphs are captured at start, after a run of every kernel, and again"
        " when the cache service's memory is mapped anew. Steps with prompts, guesses, or sink and window go without.",
    )
    overlap: bool = setting(
        True,
        group="Model",
        help="launch a step before the tokens of the one before it are read; several ranks read them first all the same",
        details="A sequence that ends unforeseen, by a stop token, a stop string or a cancellation, has then been computed for"
        " one token more, which no client sees. Steps wait for those before them beside constrained outputs, guesses and beam"
        " searches, while blocks are short, and where sequences move between tiers. With several ranks one thread talks with"
        " them, so a step only waits there for the one before, and no device begins it earlier.",
    )
    groups: bool = setting(
        True,
        group="Model",
        help="keep only the window or chunk of layers that have one, in block tables of their own",
        details="For native families with sliding windows or chunks in some layers and none in others; others are served as"
        " without, and so are all by a cache service that knows no such tables.",
    )
    checkpoint_tokens: int = setting(
        1024,
        group="Model",
        help="of models with recurrent layers, tokens from one state that is kept to the next",
        check=between(1, 1 << 20),
        unit="tokens",
        details="In whole blocks, and one block at least. A prefix hit ends at such a state, and what a preemption takes is"
        " computed again from the last one. Each of them takes a block of every group of recurrent layers. Engines share KV"
        " only where it is equal.",
    )
    tensor_parallel: int = setting(
        1,
        group="Model",
        help="processes that share the model, each with a part of its heads and of its weights",
        check=between(1, 64),
        details="For native families. The number divides the heads and widths of the model. On CUDA devices rank r is on the"
        " device r behind that of --device, and so are the pools of the cache service. --pool-memory of the cache service is of"
        " each rank.",
    )
    rank_timeout: float = setting(
        60.0,
        group="Patience",
        help="seconds that one rank waits for another before that counts as lost",
        check=between(1, 3600),
        unit="seconds",
        details="With --tensor-parallel. All ranks are then started anew, and requests go on from the tokens that they hold.",
    )
    threads: int | None = setting(
        None,
        group="Model",
        help="threads of the forward pass, of each rank",
        default_text="torch's, divided by the ranks",
        check=between(1, 1024),
    )
    lease_ms: int = setting(
        10_000,
        group="Patience",
        help="lease of the session on the cache service, milliseconds",
        check=between(500, 60_000),
        unit="milliseconds",
    )
    stall_timeout: float = setting(
        300.0,
        group="Patience",
        help="seconds without progress after which a running request ends with what it gave; 0: never",
        check=between(0, 86_400),
        unit="seconds",
    )
    reconnect_timeout: float = setting(
        20.0,
        group="Patience",
        help="seconds that requests are kept while the cache service is away",
        check=between(0, 3600),
        unit="seconds",
        details="Each answer of it is waited for as long, but for 10 seconds or more and 60 or less. Then requests go on where"
        " they were.",
    )
    take_over: str = setting(
        "",
        group="Addresses",
        help="address of an engine whose requests this one goes on with, once it is ready itself",
        default_text="none",
        check=Check("host:port, unix:/path, or empty", lambda address: TARGET_ADDRESS.refusal(address) if address else None),
        details="That engine then stops. It has to serve the same model. Where none answers, there is nothing to take over.",
    )
    stream_interval_ms: float = setting(
        16,
        group="Scheduling",
        help="least milliseconds between two messages of a stream; 0: a message for each token, however many streams there are",
        check=between(0, 1000),
        unit="milliseconds",
        details="What comes meanwhile is one message. The first token and the end are sent at once. Many streams are sent "
        "messages less often, so that this takes half of the loop's time at most.",
    )
    client_grace: float = setting(
        10.0,
        group="Patience",
        help="seconds that a stream which was taken over waits here for its client",
        check=between(0, 3600),
        unit="seconds",
    )
    drain_timeout: float = setting(
        5.0,
        group="Patience",
        help="seconds that requests have to end, and clients to hear of it, once the service is asked to stop",
        check=between(0, 3600),
        unit="seconds",
    )
    tls_cert: Path | None = tls_cert_setting()
    tls_key: Path | None = tls_key_setting()
    tls_client_ca: Path | None = tls_client_ca_setting()
    auth_tokens: Path | None = auth_tokens_setting()
    cache_tls_ca: Path | None = setting(
        None,
        group="Trust",
        help="file with the authority in PEM that signs the certificate of the cache service, which switches TLS on",
        default_text="no TLS",
        details="It goes for the engines of --prefill and --take-over as well. Unix sockets do without.",
    )
    cache_tls_cert: Path | None = setting(
        None,
        group="Trust",
        help="file with the certificate in PEM that this engine shows the cache service and other engines",
        default_text="none",
        details="With --cache-tls-key and --cache-tls-ca.",
    )
    cache_tls_key: Path | None = setting(
        None, group="Trust", help="file with the key of --cache-tls-cert in PEM", default_text="none"
    )
    cache_token_file: Path | None = setting(
        None,
        group="Trust",
        help="file with the token that this engine shows the cache service and other engines",
        default_text="none",
        details="Its role is engine, its tenant *. A file that changes is read again.",
    )
    metrics_listen: str = metrics_listen_setting()
    health_address: str = health_address_setting()
    vllm_metrics: bool = setting(
        False,
        group="Watching",
        help="tell metrics under vLLM's names, too, where both mean the same",
        details="For dashboards and autoscalers that were made for vLLM.",
    )
    trace_endpoint: str = trace_endpoint_setting()
    gateway: str = setting(
        "auto",
        group="Addresses",
        help="speak vllm.grpc.engine.VllmEngine, too, for gateways that speak HTTP with clients",
        choices=("auto", "on", "off"),
        details="auto: where the extra `gateway` is installed.",
    )
    reflection: bool = reflection_setting()
    progress: bool = setting(True, group="Model", help="show a progress bar on a terminal while weights are loaded")
    log_level: str = log_level_setting()

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


def wants_compiled(config: EngineConfig) -> bool:
    """Whether the compiled kernels of a CPU have something to do for this config."""
    serves = config.device == "cpu" and config.dtype in ("auto", "float32", "int8") and config.model != HASH_TOY
    return serves and config.cpu_kernels != "torch"


SOURCE = ConfigSource(
    EngineConfig,
    program="kvkeeper engine",
    description="The engine service: schedules requests and runs the model on the cache service's memory.",
    environment_prefix="KVKEEPER_ENGINE_",
    example="TOKEN_BUDGET=512",
)


def load_config(argv: Sequence[str], environ: Mapping[str, str]) -> EngineConfig:
    """Flags over KVKEEPER_ENGINE_* over defaults. Raises ConfigError; --help ends in SystemExit."""
    return SOURCE.load(argv, environ)
