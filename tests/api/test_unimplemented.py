"""What this build leaves out of the protocol: exactly this list."""

import grpc

from kvkeeper.cache.v1 import cache_service_pb2 as pb
from kvkeeper.client.errors import to_error
from tests.support.worlds.cache_api import DEADLINE, Api

LEFT_OUT: dict[str, str] = {}


async def _left_out(api: Api) -> dict[str, str]:
    """Calls every method of the descriptor with an empty request."""
    answers = {}
    for method in pb.DESCRIPTOR.services_by_name["CacheService"].methods:
        path = f"/kvkeeper.cache.v1.CacheService/{method.name}"
        if method.server_streaming or method.client_streaming:
            call = api.channel.stream_stream(path)(iter([b""]), timeout=DEADLINE).read()
        else:
            call = api.channel.unary_unary(path)(b"", timeout=DEADLINE)
        try:
            await call
        except grpc.aio.AioRpcError as failure:
            error = to_error(failure)
            if error.code is grpc.StatusCode.UNIMPLEMENTED:
                assert error.reason == "NOT_IMPLEMENTED"
                answers[method.name] = error.metadata["feature"]
    return answers


async def test_exactly_these_calls_are_left_out(api: Api) -> None:
    assert await _left_out(api) == LEFT_OUT


async def test_capabilities_tell_them(api: Api) -> None:
    capabilities = await api.stub.GetCapabilities(pb.GetCapabilitiesRequest(), timeout=DEADLINE)
    assert list(capabilities.unimplemented_methods) == sorted(LEFT_OUT)
