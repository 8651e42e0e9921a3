"""What fronts are given at their start, made from an engine's parts."""

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from kvkeeper.common.service.methods import Contract
from kvkeeper.common.service.turns import Turns
from kvkeeper.common.trust.guard import Guard

from ...config import EngineConfig
from ..front.config import FrontConfig
from ..methods import CONTRACT
from ..service import EngineService
from .calls import FrontServices, served_methods
from .fronts import Fronts
from .told import FrontSetUp


def front_services(service: EngineService, turns: Turns, guard: Guard, others: Sequence[tuple[Contract, Any]]) -> FrontServices:
    """others: contracts beside our own, each with what answers."""
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
        own,
    )


def front_set_up(
    config: EngineConfig, fronts: Fronts, service: EngineService, others: Sequence[tuple[Contract, Any]]
) -> FrontSetUp:
    """What each of the fronts needs to serve at their address."""
    own = front_config(config, fronts.address, service.message_bytes, has_gateway=bool(others))
    tokenizer = service.text.tokenizer
    return FrontSetUp(own.to_json(), None if tokenizer is None else tokenizer.state())


def front_config(config: EngineConfig, address: str, message_bytes: int, *, has_gateway: bool) -> FrontConfig:
    """Bounds of connections and of memory are divided among the fronts; each can take one message at least.

    message_bytes: of a message with a prompt.
    """
    own = {each.name: getattr(config, each.name) for each in fields(FrontConfig) if hasattr(config, each.name)}
    shared = {name: -(-own[name] // config.fronts) for name in ("connections", "many_calls")}
    shared["receive_memory"] = max(message_bytes, own["receive_memory"] // config.fronts)
    given = {"listen": address, "message_bytes": message_bytes, "has_gateway": has_gateway}
    return FrontConfig(**{**own, **shared, **given})
