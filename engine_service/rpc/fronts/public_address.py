"""The address of an engine, served by its own loop or by front processes: which of them is decided here alone."""

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from prometheus_client import Metric

from kvkeeper.common.service.endpoint import Admission, Endpoint
from kvkeeper.common.service.intake import Intake
from kvkeeper.common.service.methods import Contract, MethodRouter
from kvkeeper.common.service.turns import Turns
from kvkeeper.common.trust.guard import Guard

from ...config import EngineConfig
from ..methods import CONTRACT, router_of
from ..metrics import PREFIX
from ..service import EngineService
from .fronts import Fronts, open_fronts
from .set_up import front_services, front_set_up

Protocols = Sequence[tuple[Contract, Any]]  # beside our own, each with what answers


async def open_address(config: EngineConfig, guard: Guard, intake: Intake, message_bytes: int) -> Endpoint | Fronts:
    """Takes the address. message_bytes: of a message with a prompt. Raises StartError, AddressInUse."""
    if config.fronts:
        return await open_fronts(config.listen, config.fronts)
    admission = Admission(config.connections, config.connection_calls, (intake,))
    return await Endpoint.open(config.listen, message_bytes, admission=admission, guard=guard)


async def serve_at(
    endpoint: Endpoint | Fronts, config: EngineConfig, service: EngineService, turns: Turns, guard: Guard, others: Protocols
) -> None:
    """Answers calls from now on. Raises StartError."""
    if isinstance(endpoint, Fronts):
        set_up = front_set_up(config, endpoint, service, others)
        await endpoint.start(front_services(service, turns, guard, others), set_up, lambda: service.max_len)
    else:
        size = service.message_bytes
        routers = [router_of(service, CONTRACT.with_prompts_of(size))]
        routers += [MethodRouter(contract.with_prompts_of(size), answering) for contract, answering in others]
        await endpoint.start(*routers, has_reflection=config.reflection)


def metrics_at(endpoint: Endpoint | Fronts, service: EngineService, guard: Guard) -> Iterator[Metric]:
    """Of a scrape."""
    yield from service.metrics()
    refused = Counter[str]()
    if isinstance(endpoint, Fronts):
        yield from endpoint.metrics(PREFIX, service.model_name)
        refused = endpoint.refused
    yield from guard.metrics(PREFIX, refused, model=service.model_name)
