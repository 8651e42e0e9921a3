"""Row 30: no call of one tenant finds what another has, in any of the ways in which the tenant itself finds it.

Two tenants store prompts that the other never sees, in sessions of their own. A thief guesses everything right: the prompt to
the last token, the session, the epoch, the sequence's id. Each probe is made by the owner as well, and has to find it then.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import grpc

from kvkeeper.client.errors import to_error
from tests.soak.row import Counts
from tests.support.trust.tenant_calls import TenantCalls, tenants_served
from tests.support.worlds.cache_api import BLOCK_SIZE

LEAST_CONTROL = 0.95
_NAMES = ("red", "blue")
_NUM_PROBES, _NUM_KEPT = 1_000, 4
_NUM_BLOCKS = 60
_SPARE_ID = 1 << 40  # of sequences that a probe makes


@dataclass(frozen=True, slots=True)
class _Secret:
    """A cached prompt with a live sequence. ids: of its owner's session."""

    sequence_id: int
    prompt: list[int]
    ids: dict[str, Any]


@dataclass(frozen=True, slots=True)
class _Probe:
    """A call. on_session: the owner's, else the caller's; found: an answer tells of the secret; undo: a call after it."""

    method: str
    fields: Callable[[_Secret], dict[str, Any]]
    found: Callable[[Any, _Secret], bool] = lambda _, __: True
    on_session: bool = False
    undo: str = ""


def _prompt(secret: _Secret) -> dict[str, Any]:
    return {"token_ids": secret.prompt}


def _sequence(secret: _Secret) -> dict[str, Any]:
    return {"sequence_id": secret.sequence_id}


def _has_sequence(rows: Any, secret: _Secret) -> bool:
    return any((row.session_id, row.sequence_id) == (secret.ids["session_id"], secret.sequence_id) for row in rows.sequences)


_PROBES = (
    _Probe("MatchPrefix", _prompt, lambda answer, _: answer.num_matched_tokens > 0),
    _Probe("CheckAdmission", _prompt, lambda answer, _: answer.num_hit_tokens > 0),
    _Probe("ExplainMatch", _prompt, lambda answer, _: answer.num_matched_tokens > 0),
    _Probe("PinPrefix", lambda secret: {**_prompt(secret), "ttl_ms": 1}, lambda answer, _: answer.num_pinned_tokens > 0),
    _Probe("HintPrefix", lambda secret: {"hints": [_prompt(secret)]}, lambda answer, _: sum(answer.num_hinted_tokens) > 0),
    _Probe("CreateSequence", lambda secret: {**_prompt(secret), "sequence_id": _SPARE_ID},
           lambda answer, _: answer.num_matched_tokens > 0, undo="ReleaseSequence"),
    _Probe("GetSequence", lambda secret: {**_sequence(secret), "include_tokens": True}, on_session=True),
    _Probe("UpdateSequence", lambda secret: {**_sequence(secret), "priority": 1}, on_session=True),
    _Probe("ForkSequence", lambda secret: {"parent_id": secret.sequence_id, "child_id": _SPARE_ID, "num_tokens": 1},
           on_session=True, undo="ReleaseSequence"),
    _Probe("HandOffSequence", _sequence, on_session=True, undo="WithdrawHandOff"),
    _Probe("RenewSession", lambda _: {}, on_session=True),
    _Probe("ListSequences", lambda _: {"session_id": ""}, _has_sequence),
    _Probe("ListSequences", lambda secret: {"session_id": secret.ids["session_id"]}),
)  # fmt: skip


async def run(seed: int) -> Counts:
    """Counts probes of thieves; the fault is the same probe by the owner, which found what it asked for."""
    rng = random.Random(seed)
    num_found, last_id = 0, 0
    async with tenants_served(_NAMES, num_blocks=_NUM_BLOCKS, max_sequences=4 * _NUM_KEPT) as tenants:
        kept: dict[str, list[_Secret]] = {name: [] for name in _NAMES}
        for _ in range(_NUM_PROBES):
            owner, thief = rng.sample(_NAMES, 2)
            if not kept[owner] or rng.random() < 0.2:
                last_id += 1
                prompt = [rng.randrange(1 << 31) for _ in range(rng.randint(1, 3) * BLOCK_SIZE + 1)]
                secret = _Secret(last_id, prompt, tenants[owner].ids)
                await tenants[owner].store(secret.sequence_id, prompt)
                kept[owner].append(secret)
                if len(kept[owner]) > _NUM_KEPT:
                    await tenants[owner].call("ReleaseSequence", sequence_id=kept[owner].pop(0).sequence_id)
            probe, secret = rng.choice(_PROBES), rng.choice(kept[owner])
            assert not await _finds(tenants[thief], probe, secret), f"{probe.method} found what is another tenant's"
            num_found += await _finds(tenants[owner], probe, secret)
    assert num_found >= LEAST_CONTROL * _NUM_PROBES, f"the owners found {num_found} of {_NUM_PROBES}"
    return Counts(_NUM_PROBES, num_found)


async def _finds(tenant: TenantCalls, probe: _Probe, secret: _Secret) -> bool:
    fields = probe.fields(secret)
    try:
        answer = await tenant.call(probe.method, **((secret.ids if probe.on_session else {}) | fields))
    except grpc.RpcError as error:
        reason = to_error(error).reason
        assert reason == "UNKNOWN_SESSION", f"{probe.method}: {reason}, which tells that there is such a session"
        return False
    if probe.undo:
        await tenant.call(probe.undo, sequence_id=fields.get("child_id") or fields["sequence_id"])
    return probe.found(answer, secret)
