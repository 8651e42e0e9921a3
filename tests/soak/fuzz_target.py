"""The process that atheris feeds: `python -m tests.soak.fuzz_target SERVICE FOLDER -runs=N -seed=S`, for rows of promise 34.

Both services run here, and each input is a call of one RPC of SERVICE (cache, engine or gateway), as the router gets it from
gRPC: its first byte names the RPC, the rest is the message, or the messages, of the call. A refusal with a Status is right; any
other exception, or one that the service itself takes for a bug, ends this process, and so do a crash, a call that does not end,
and too much memory. The corpus begins with a valid message of each RPC, under a session that lives. At the end the pool is
audited, and the last line tells the calls and the refusals.
"""

import asyncio
import json
import secrets
import struct
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import atheris

with atheris.instrument_imports(include=["kvkeeper"]):  # the libraries would take most of a minute
    from kvkeeper.cache.v1 import cache_service_pb2 as cache_pb
    from kvkeeper.cache_service.rpc.methods import CONTRACT as CACHE
    from kvkeeper.cache_service.rpc.methods import EOF
    from kvkeeper.cache_service.runtime import session_manager
    from kvkeeper.common.service.endpoint import Endpoint
    from kvkeeper.common.service.methods import MethodRouter
    from kvkeeper.engine_service.compute.served_model import load_served_model
    from kvkeeper.engine_service.config import HASH_TOY, EngineConfig
    from kvkeeper.engine_service.movement.messages import identity
    from kvkeeper.engine_service.rpc.gateway.methods import CONTRACT as GATEWAY
    from kvkeeper.engine_service.rpc.methods import CONTRACT as ENGINE

from google.protobuf.message_factory import GetMessageClass

from tests.soak.worker import quiet
from tests.support.processes.service_pair import Services, services
from tests.support.worlds.cache_api import SPEC, le32, le64

SESSION_ID, EPOCH = "5e" * 16, 7  # of the session that the corpus knows
CONTRACTS = {"cache": CACHE.service, "engine": ENGINE.service, "gateway": GATEWAY.service}
_MOST_TURNS = 200  # of the loop, for one call; then its client goes away
_AUDIT_EVERY = 500


class Refused(Exception):
    """The call ended with a Status."""


class Call:
    """What a handler sees of a call, as grpc.aio's ServicerContext shows it."""

    def __init__(self, messages: Iterator[bytes]) -> None:
        self._messages = messages

    def peer(self) -> str:
        return "ipv4:127.0.0.1:1"

    def invocation_metadata(self) -> tuple[()]:
        return ()

    async def read(self) -> Any:
        return next(self._messages, EOF)

    async def write(self, answer: bytes) -> None:
        assert isinstance(answer, bytes)

    async def abort_with_status(self, status: Any) -> None:
        if status.code.value[0] in (2, 13, 15):  # UNKNOWN, INTERNAL, DATA_LOSS: a bug of the service, whatever was sent
            raise AssertionError(f"{status.code}: {status.details}")
        raise Refused

    async def abort(self, code: Any, details: str = "", trailing_metadata: Any = ()) -> None:
        raise Refused


class World:
    """Both services, and their routers by name."""

    def __init__(self, runner: asyncio.Runner, name: str) -> None:
        self.num_calls = self.num_refused = 0
        self._runner = runner
        self._routers: dict[str, MethodRouter] = {}
        self._note_routers()
        runner.run(self._start())
        self._contract = CONTRACTS[name]
        self._methods = sorted(self._handlers)
        self.audit()

    @property
    def _handlers(self) -> Any:
        return self._routers[self._contract.full_name]._handlers

    def _note_routers(self) -> None:
        start = Endpoint.start

        async def noting(endpoint: Endpoint, *routers: MethodRouter, **options: Any) -> None:
            self._routers |= {router.service_name: router for router in routers}
            await start(endpoint, *routers, **options)

        Endpoint.start = noting  # type: ignore[method-assign]

    async def _start(self) -> None:
        self._services = services()
        self._world: Services = await self._services.__aenter__()
        self.cache = await self._world.start_cache(num_blocks=64, max_sequences=32, logits_memory=1 << 16)
        self._engine = await self._world.start_engine(client_grace=0.05)
        session_manager.secrets = SimpleNamespace(token_hex=self._token_hex)  # type: ignore[assignment]

    def _token_hex(self, num_bytes: int) -> str:
        """The id of the corpus for the first session that has none like it."""
        taken = self.cache.session_manager.find(SESSION_ID) is not None or self._is_token
        self._is_token = not self._is_token
        return secrets.token_hex(num_bytes) if taken else SESSION_ID

    _is_token = False  # a session takes two: its id, then its token

    def call(self, data: bytes) -> None:
        """One input. Raises what a service must never raise."""
        self.num_calls += 1
        if data:
            name = self._methods[data[0] % len(self._methods)]
            self._runner.run(self._call(name, data[1:]))
        if self.num_calls % _AUDIT_EVERY == 0:
            self.audit()

    async def _call(self, name: str, data: bytes) -> None:
        handler = self._handlers[name]
        stream_in, stream_out = handler.request_streaming, handler.response_streaming
        context = Call(_cut(data) if stream_in else iter(()))
        kind = f"{'stream' if stream_in else 'unary'}_{'stream' if stream_out else 'unary'}"
        task = asyncio.ensure_future(getattr(handler, kind)(None if stream_in else data, context))
        for _ in range(_MOST_TURNS):
            if task.done():
                break
            await asyncio.sleep(0)
        task.cancel()
        try:
            await task
        except Refused:
            self.num_refused += 1
        except asyncio.CancelledError:
            pass

    def audit(self) -> None:
        """Every pool is as its invariants want it; the session of the corpus lives, and an engine takes requests."""
        self._runner.run(self._audit())

    async def _audit(self) -> None:
        for pool in self.cache.session_manager.registry.pools:
            assert pool.manager.queries.check_invariants() == []
        if self._engine.engine.is_stopping:  # it has handed over
            self._engine = await self._world.start_engine(client_grace=0.05)
        if self.cache.session_manager.find(SESSION_ID) is None:
            opened = cache_pb.OpenSessionRequest(spec=SPEC, executor=cache_pb.EXECUTOR_CACHE, ttl_ms=3_600_000)
            name = CACHE.service.full_name
            handler = self._routers[name]._handlers[f"/{name}/OpenSession"]
            await handler.unary_unary(opened.SerializeToString(), Call(iter(())))
            live = self.cache.session_manager.find(SESSION_ID)
            assert live is not None
            live.core.epoch = EPOCH

    def corpus(self, folder: Path) -> None:
        """A valid message of each RPC, and an empty one."""
        for place, path in enumerate(self._methods):
            method = self._contract.methods_by_name[path.rsplit("/", 1)[1]]
            for number, message in enumerate((GetMessageClass(method.input_type)(), _filled(method.input_type))):
                raw = message.SerializeToString()
                framed = struct.pack("<H", len(raw)) + raw if method.client_streaming else raw
                (folder / f"{place}-{number}").write_bytes(bytes([place]) + framed)


def _cut(data: bytes) -> Iterator[bytes]:
    """The messages of a stream: each behind its length in two bytes."""
    while len(data) >= 2:
        (length,) = struct.unpack("<H", data[:2])
        yield data[2 : 2 + length]
        data = data[2 + length :]


_TOY = load_served_model(EngineConfig(model=HASH_TOY))
# Values of fields, by name, with which most calls get past their checks.
_VALUES: dict[str, Any] = {
    "session_id": SESSION_ID, "epoch": EPOCH, "spec": SPEC, "engine": identity(_TOY), "address": "unix:/none",
    "sequence_id": 1, "num_tokens": 5, "first_token_idx": 5, "parent_id": 1, "child_id": 2, "ttl_ms": 1000, "pin_id": "x",
    "request_id": "r", "tenant": "t", "step_id": 1, "start_sequence_ids": le64(1), "start_max_new_tokens": le32(4),
    "start_max_hit_tokens": le32(4), "num_blocks": 1, "block_id": 1, "page_size": 2, "priority": 1, "max_tokens": 3, "n": 2,
    "temperature": 0.5, "top_k": 3, "seed": 7, "reuse_hint": 1, "stream": True, "input_ids": [1, 2, 3], "ids": [1, 2, 3],
}  # fmt: skip
_PARTS = {"sampling", "sampling_params", "tokenized", "token_ids", "request", "stored"}  # messages in messages that are filled


def _filled(kind: Any) -> Any:
    """A message with these values in its fields of these names."""
    message = GetMessageClass(kind)()
    for field in kind.fields:
        value = _VALUES.get(field.name)
        if field.name == "token_ids" and field.message_type is None:
            value = [1, 2, 3, 4, 5]
        if field.message_type is not None and not field.is_repeated:
            if value is not None:
                getattr(message, field.name).CopyFrom(value)
            elif field.name in _PARTS:
                getattr(message, field.name).CopyFrom(_filled(field.message_type))
        elif value is not None and field.is_repeated:
            getattr(message, field.name).extend(value)
        elif value is not None:
            setattr(message, field.name, value)
    return message


def main() -> None:
    name, folder, *options = sys.argv[1:]
    num_runs = next(int(option.removeprefix("-runs=")) for option in options if option.startswith("-runs="))
    quiet()
    world = World(asyncio.Runner(), name)
    corpus = Path(folder) / "corpus"
    corpus.mkdir()
    world.corpus(corpus)

    def run(data: bytes) -> None:
        world.call(data)
        if world.num_calls == num_runs:
            world.audit()
            counts = {"num_calls": world.num_calls, "num_refused": world.num_refused}
            (Path(folder) / "counts").write_text(json.dumps(counts))

    atheris.Setup([sys.argv[0], str(corpus), f"-artifact_prefix={folder}/", *options], _with_bytes(run))
    atheris.Fuzz()


def _with_bytes(run: Callable[[bytes], None]) -> Callable[[bytes], None]:
    return lambda data: run(bytes(data))


if __name__ == "__main__":
    main()
