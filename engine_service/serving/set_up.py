"""Joins an engine's service to its fronts: what they are given at their start, and what a scrape reports about them."""

from collections.abc import Iterator, Sequence
from dataclasses import fields
from typing import Any

from prometheus_client import Metric

from kvkeeper.common.service.methods import Contract
from kvkeeper.common.service.turns import Turns
from kvkeeper.common.trust.guard import Guard

from ..config import EngineConfig
from ..rpc.methods import CONTRACT
from ..rpc.metrics import PREFIX
from ..rpc.service import EngineService
from .calls import FrontServices, served_methods
from .front_config import FrontConfig
from .fronts import Fronts

Protocols = Sequence[tuple[Contract, Any]]  # beside our own, each with what serves its calls


async def serve_at(
    fronts: Fronts, config: EngineConfig, service: EngineService, turns: Turns, guard: Guard, others: Protocols
) -> None:
    """Returns calls from now on. Raises StartError."""
    own = front_config(config, fronts.address, service.message_bytes, has_gateway=bool(others))
    await fronts.start(_front_services(service, turns, guard, others), own, lambda: service.max_len)


def _front_services(service: EngineService, turns: Turns, guard: Guard, others: Protocols) -> FrontServices:
    own = CONTRACT.with_prompts_of(service.message_bytes)
    methods = served_methods(own, service)
    for contract, answering in others:
        methods.update(served_methods(contract.with_prompts_of(service.message_bytes), answering))
    return FrontServices(
        methods,
        turns,
        service.admit_for_front,
        service.stop_at,
        service.streams.counted,
        service.pace,
        lambda path, caller: guard.refused.note("TENANT_NOT_ALLOWED", path, caller),
        service.text,
        service.unread,
        own,
    )


def front_config(config: EngineConfig, address: str, message_bytes: int, *, has_gateway: bool) -> FrontConfig:
    """Bounds of connections and of memory are divided among the fronts; each can take one message at least.

    message_bytes: of a message with a prompt.
    """
    own = {each.name: getattr(config, each.name) for each in fields(FrontConfig) if hasattr(config, each.name)}
    num_fronts = max(config.fronts, 1)
    shared = {name: -(-own[name] // num_fronts) for name in ("connections", "many_calls")}
    shared["receive_memory"] = max(message_bytes, own["receive_memory"] // num_fronts)
    given = {"listen": address, "message_bytes": message_bytes, "has_gateway": has_gateway}
    return FrontConfig(**{**own, **shared, **given})


def metrics_at(fronts: Fronts, service: EngineService, guard: Guard) -> Iterator[Metric]:
    """The metrics of a scrape."""
    yield from service.metrics()
    yield from fronts.metrics(PREFIX, service.model_name)
    yield from guard.metrics(PREFIX, fronts.refused, model=service.model_name)
