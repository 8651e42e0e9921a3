"""Refusals on the wire: every reason has the code that the protocol says, and nothing from inside gets out."""

import grpc
import pytest
from google.rpc import error_details_pb2

from kvkeeper.cache.v1 import cache_service_pb2 as pb
from kvkeeper.cache_service.core.values import errors
from kvkeeper.cache_service.rpc.status import REFUSALS
from kvkeeper.common.trust.refusals import CODES
from tests.support.worlds.cache_api import DEADLINE, Api, documented_codes, refusal


def refusals() -> list[type[errors.CacheError]]:
    return [error for error in errors.CacheError.__subclasses__() if error.__module__ == errors.__name__]


def test_every_reason_of_the_protocol_has_an_error_and_its_documented_code() -> None:
    names = {name.removeprefix("ERROR_REASON_") for name in pb.ErrorReason.keys()} - {"UNSPECIFIED"}  # noqa: SIM118
    assert {error.reason for error in refusals()} | CODES.keys() == names
    codes = {reason: code.name for reason, code in CODES.items()}  # of the gate, which refuses before a handler runs
    for error in refusals():
        made = REFUSALS.to_status(error("text", some="data"))
        codes[error.reason] = next(code.name for code in grpc.StatusCode if code.value[0] == made.code)
    assert codes == documented_codes()


@pytest.mark.parametrize("error", refusals())
def test_a_status_carries_one_error_info_and_says_when_to_retry(error: type[errors.CacheError]) -> None:
    made = REFUSALS.to_status(error("text", limit=7))
    infos = [detail for detail in made.details if detail.Is(error_details_pb2.ErrorInfo.DESCRIPTOR)]
    retries = [detail for detail in made.details if detail.Is(error_details_pb2.RetryInfo.DESCRIPTOR)]
    assert len(infos) == 1
    info = error_details_pb2.ErrorInfo()
    infos[0].Unpack(info)
    assert (info.domain, info.reason, dict(info.metadata)) == ("kvkeeper", error.reason, {"limit": "7"})
    assert (len(retries) == 1) == (made.code == grpc.StatusCode.UNAVAILABLE.value[0])


@pytest.mark.parametrize("method", ["Step", "StreamSteps", "GetSequence", "ReadKv", "WriteKv"])
async def test_a_bug_is_answered_without_details(api: Api, monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    session = await api.open(engine=False)

    def fails(*_: object, **__: object) -> None:
        raise AssertionError("secret")

    (pool,) = api.server.session_manager.registry.pools
    monkeypatch.setattr(pool.manager.steps, "step", fails)
    for name in ("view", "readable", "writable_slots"):
        monkeypatch.setattr(pool.manager.queries, name, fails)
    key = bytes(12)
    calls = {
        "Step": lambda: session.step(1),
        "StreamSteps": lambda: api.raw_stream(iter([session.step_bytes(1)])).read(),
        "GetSequence": lambda: session.call("GetSequence", sequence_id=1),
        "ReadKv": lambda: session.read_kv(1),
        "WriteKv": lambda: api.stub.WriteKv(
            iter([pb.WriteKvRequest(**session.ids, sequence_id=1, key=key, value=key)]), timeout=DEADLINE
        ),
    }
    error = await refusal(calls[method]())
    assert (error.code, error.reason) == (grpc.StatusCode.INTERNAL, "BROKEN_INVARIANT")
    assert "secret" not in error.message
    monkeypatch.undo()
    await session.step(1)


async def test_an_unknown_method_is_unimplemented(api: Api) -> None:
    error = await refusal(api.channel.unary_unary("/kvkeeper.cache.v1.CacheService/Nothing")(b"", timeout=DEADLINE))
    assert error.code is grpc.StatusCode.UNIMPLEMENTED
