"""vLLM's KV hints: the examples of the table in docs are messages of its schema, and do what vLLM says of them."""

import json
from typing import Annotated, Any, Literal

import msgspec
import pytest
from google.protobuf import text_format

from kvkeeper.cache.v1 import cache_service_pb2 as pb
from tests.support.documents.markdown import page
from tests.support.worlds.cache_api import Api

ROWS = [[cell.strip("`") for cell in row] for row in page("docs/operate/eviction.md").table("vLLM's KV hints")]
FIRST, SECOND = range(8), range(100, 108)  # two blocks each


class Action(msgspec.Struct, frozen=True):
    """Of an envelope, as vllm/v1/kv_hints/protocol.py has it."""

    action_id: str
    action_type: str
    action_version: str
    payload: dict[str, Any]


class Envelope(msgspec.Struct, frozen=True):
    protocol_version: str
    message_id: str
    actions: list[Action]


class SetPriority(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """As vllm/v1/kv_hints/actions.py has it: higher numbers are evicted later, a block without one has 0."""

    target: Literal["request_cached"]
    location: Literal["local_g1"]
    claim_id: Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
    revision: Annotated[int, msgspec.Meta(ge=0)]
    value: int | None
    ttl_seconds: float | None = None

    def says(self) -> tuple[int, float | None]:
        """Whether it is to be kept or not, as a sign, and the seconds that it is kept. To clear a claim is to say no time."""
        assert (self.ttl_seconds is None) == (self.value is None)
        value = self.value or 0
        return (value > 0) - (value < 0), self.ttl_seconds if value > 0 else None


class Directive(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """As vllm/v1/kv_hints/retain.py has it."""

    priority: Annotated[int, msgspec.Meta(ge=0, le=100)]
    start: Annotated[int, msgspec.Meta(ge=0)] = 0
    end: int | None = None
    duration: Annotated[float, msgspec.Meta(ge=0)] | None = None
    covers_output: bool = False


class Retain(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    scope: str | None
    directives: list[Directive]

    def says(self) -> tuple[int, float | None]:
        (directive,) = self.directives
        return int(directive.priority > 0), directive.duration


SCHEMA: dict[str, type[SetPriority | Retain]] = {"vllm.set_priority": SetPriority, "kv.retain": Retain}


def test_the_table_has_every_action_that_has_a_payload() -> None:
    assert {action_type for action_type, _, _ in ROWS} == SCHEMA.keys()


@pytest.mark.parametrize(("action_type", "payload", "hint"), ROWS)
async def test_an_action_and_its_hint_say_the_same(api: Api, action_type: str, payload: str, hint: str) -> None:
    action = {"action_id": "a", "action_type": action_type, "action_version": "1.0", "payload": json.loads(payload)}
    message = msgspec.msgpack.encode({"protocol_version": "0.1", "message_id": "m", "actions": [action]})
    (decoded,) = msgspec.msgpack.decode(message, type=Envelope).actions
    kept, seconds = msgspec.convert(decoded.payload, SCHEMA[decoded.action_type]).says()
    prefix = text_format.Parse(hint, pb.PrefixHint(token_ids=FIRST))
    assert prefix.retain_ms == 1000 * (seconds or 0)

    session = await api.open(engine=False, ttl_ms=3_600_000)
    for sequence_id, tokens in enumerate((FIRST, SECOND), 1):
        await session.call("CreateSequence", sequence_id=sequence_id, token_ids=tokens)
        await session.call("ExtendSequence", sequence_id=sequence_id, num_tokens=len(tokens))
        await session.call("CommitSequence", sequence_id=sequence_id, num_tokens=8, first_token_idx=8)
        await session.call("ReleaseSequence", sequence_id=sequence_id)
    await session.call("HintPrefix", hints=[prefix])
    stats = (await api.stats()).pools[0]
    assert (stats.num_soon_blocks, stats.num_no_reuse_blocks) == (2 * (kept > 0), 2 * (kept < 0))
