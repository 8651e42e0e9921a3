"""The contract of the gateway's protocol: its methods, which of them carry prompts, and what this engine has none of."""

from dataclasses import replace

import grpc
from smg_grpc_proto.generated import vllm_engine_pb2 as pb

from kvkeeper.common.service.methods import Contract

from ..methods import REFUSALS

# Method -> feature of the NOT_IMPLEMENTED answer.
UNIMPLEMENTED_METHODS = {
    "Embed": "embeddings",
    "StartProfile": "profiling",
    "StopProfile": "profiling",
    "FlushCache": "flushing by an engine, whose pool is shared",
}

# A gateway makes 501 of UNIMPLEMENTED, which HTTP clients take for a fault of the server and repeat.
_REFUSALS = replace(REFUSALS, codes={**REFUSALS.codes, "NOT_IMPLEMENTED": grpc.StatusCode.INVALID_ARGUMENT})

CONTRACT = Contract(
    service=pb.DESCRIPTOR.services_by_name["VllmEngine"],
    with_prompt=frozenset({"Generate"}),
    unimplemented=UNIMPLEMENTED_METHODS,
    refusals=_REFUSALS,
)
