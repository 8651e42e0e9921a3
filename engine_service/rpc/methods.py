"""The contract of the engine service: its methods, which of them carry prompts, and the errors it refuses with."""

from kvkeeper.engine.v1 import engine_service_pb2 as pb
from kvkeeper.service.methods import Contract

from .status import REFUSALS

# In the protocol and not in this build: method -> feature of the NOT_IMPLEMENTED answer. A test holds the list.
UNIMPLEMENTED_METHODS: dict[str, str] = {}

CONTRACT = Contract(
    service=pb.DESCRIPTOR.services_by_name["EngineService"],
    with_prompt=frozenset({"Generate", "SubmitRequest", "Tokenize", "Detokenize"}),
    unimplemented=UNIMPLEMENTED_METHODS,
    refusals=REFUSALS,
)
