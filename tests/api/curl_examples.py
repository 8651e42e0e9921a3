"""Calls by hand, as docs/api/api-by-hand.md shows them: one table, rendered for grpcurl and for `buf curl`.

`python tests/api/curl_examples.py` prints the block of the page. A session's id and epoch go from the answer of OpenSession
into the shell variable S, which the later lines put into their bodies.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

CACHE = "127.0.0.1:7410"
ENGINE = "127.0.0.1:7411"
CACHE_SERVICE = "kvkeeper.cache.v1.CacheService"
ENGINE_SERVICE = "kvkeeper.engine.v1.EngineService"

# The session's part of a body, out of the answer of OpenSession.
_KEEP_SESSION = (
    "python3 -c 'import json, sys; a = json.load(sys.stdin);"
    ' print(json.dumps({"session_id": a["sessionId"], "epoch": a["epoch"]})[1:-1])\''
)


@dataclass(frozen=True, slots=True)
class Example:
    """One call. in_session puts the session into the body, opens_session keeps it for the later ones.

    to_file is where the answers of a call go that lasts, and so runs in the background.
    """

    title: str
    service: str
    method: str
    body: dict[str, Any] = field(default_factory=dict)
    in_session: bool = False
    opens_session: bool = False
    to_file: str = ""

    @property
    def address(self) -> str:
        return CACHE if self.service == CACHE_SERVICE else ENGINE

    def grpcurl(self) -> str:
        return self._line(f"grpcurl -plaintext -d {self._data()} {self.address} {self.service}/{self.method}")

    def buf_curl(self) -> str:
        where = f"http://{self.address}/{self.service}/{self.method}"
        return self._line(f"buf curl --protocol grpc --http2-prior-knowledge --data {self._data()} {where}")

    def _data(self) -> str:
        body = json.dumps(self.body)
        if not self.in_session:
            return f"'{body}'"
        return f"""'{{'"$S"', {body[1:]}'""" if self.body else """'{'"$S"'}'"""

    def _line(self, command: str) -> str:
        if self.to_file:
            return f"{command} > {self.to_file} &"
        return f"S=$({command} | {_KEEP_SESSION})" if self.opens_session else command


_SPEC = {
    "model_id": "curl-example",
    "num_layers": 2,
    "num_kv_heads": 2,
    "head_dim": 16,
    "kv_dtype": "KV_DTYPE_FLOAT32",
    "block_size": 4,
    "layout": "KV_LAYOUT_BLOCK_MAJOR",
}

EXAMPLES = [
    Example("What the cache service can do", CACHE_SERVICE, "GetCapabilities"),
    Example(
        "Open a session; S keeps its id and epoch",
        CACHE_SERVICE,
        "OpenSession",
        {"spec": _SPEC, "ttl_ms": 600_000, "client_name": "curl"},
        opens_session=True,
    ),
    Example(
        "Store a prompt",
        CACHE_SERVICE,
        "CreateSequence",
        {"sequence_id": 1, "token_ids": [11, 12, 13, 14, 15, 16]},
        in_session=True,
    ),
    Example(
        "Reserve slots for it; the answer shows its block table",
        CACHE_SERVICE,
        "ExtendSequence",
        {"sequence_id": 1, "num_tokens": 6},
        in_session=True,
    ),
    Example(
        "Declare its K and V written: the full block becomes shareable",
        CACHE_SERVICE,
        "CommitSequence",
        {"sequence_id": 1, "num_tokens": 6},
        in_session=True,
    ),
    Example("Look at it", CACHE_SERVICE, "GetSequence", {"sequence_id": 1, "include_tokens": True}, in_session=True),
    Example(
        "Why a longer prompt's match ends where it does",
        CACHE_SERVICE,
        "ExplainMatch",
        {"token_ids": [11, 12, 13, 14, 15, 16, 17, 18]},
        in_session=True,
    ),
    Example(
        "Keep what is cached of it from eviction, for a minute",
        CACHE_SERVICE,
        "PinPrefix",
        {"token_ids": [11, 12, 13, 14, 15, 16], "ttl_ms": 60_000},
        in_session=True,
    ),
    Example(
        "In the background: all that is cached, then every change, until the session is closed",
        CACHE_SERVICE,
        "WatchEvents",
        in_session=True,
        to_file="events.json",
    ),
    Example("Give its blocks back", CACHE_SERVICE, "ReleaseSequence", {"sequence_id": 1}, in_session=True),
    Example("Close the session", CACHE_SERVICE, "CloseSession", {"drained": True}, in_session=True),
    Example("Counts: the committed block is still cached", CACHE_SERVICE, "GetStats"),
    Example("Which model the engine serves", ENGINE_SERVICE, "GetModel"),
    Example(
        "Generate; the answers stream in",
        ENGINE_SERVICE,
        "Generate",
        {"text": "def fibonacci(n):", "sampling": {"max_tokens": 16, "temperature": 0}},
    ),
]


def block(render: Callable[[Example], str]) -> str:
    """The examples as one shell block of the page."""
    lines = [line for example in EXAMPLES for line in (f"# {example.title}", render(example))]
    return "\n".join(["```sh", *lines, "```"])


if __name__ == "__main__":
    print(f"{block(Example.grpcurl)}\n\nThe same with `buf curl`:\n\n{block(Example.buf_curl)}")
