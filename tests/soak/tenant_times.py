"""Row 31: how long a look-up takes tells nothing of what another tenant has cached.

A spy looks up prompts that its victim has cached, prompts that it has cached itself, and prompts that are nowhere, in random
order. From the times of two kinds the AUC is made: how often a look-up of one took longer than one of the other, which is 1/2
where they tell nothing. The control: the spy tells its own prompts from those that are nowhere. What is counted is the time
that the thread of service and spy computes, with messages made before: what a busy machine adds, or where the spy's own lists
happen to lie, would only hide a difference or feign one.
"""

import asyncio
import random
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from kvkeeper.cache.v1 import cache_service_pb2 as pb
from kvkeeper.trust.caller import Caller, Role
from tests.soak.row import Counts
from tests.support.trust.guarded_server import TokenFile, bearer
from tests.support.worlds.cache_api import DEADLINE, Api, serving

MOST_TOLD, LEAST_CONTROL = 0.55, 0.95
_METHODS = ("MatchPrefix", "CheckAdmission", "ExplainMatch")  # by seed
_NUM_PAIRS = 2_500
_NUM_PROMPTS, _PROMPT_TOKENS = 25, 3_000
_TOKENS = 1 << 28, 1 << 30  # ids that are equally long in a message
_SPEC = pb.KvSpec(model_id="tiny", num_layers=1, num_kv_heads=1, head_dim=1, kv_dtype=pb.KV_DTYPE_FLOAT16, block_size=1,
                  layout=pb.KV_LAYOUT_BLOCK_MAJOR)  # fmt: skip


class _Tenant:
    """A tenant's calls in a session of its own."""

    def __init__(self, api: Api, token: str) -> None:
        self._api, self._metadata = api, bearer(token)
        self._ids: dict[str, Any] = {}

    async def call(self, method: str, **fields: Any) -> Any:
        request = getattr(pb, f"{method}Request")(**self._ids, **fields)
        return await getattr(self._api.stub, method)(request, timeout=DEADLINE, metadata=self._metadata)

    async def open(self) -> None:
        opened = await self.call("OpenSession", spec=_SPEC, ttl_ms=3_600_000)
        self._ids = {"session_id": opened.session_id, "epoch": opened.epoch}

    async def store(self, prompts: Sequence[list[int]]) -> None:
        for sequence_id, prompt in enumerate(prompts, 1):
            await self.call("CreateSequence", sequence_id=sequence_id, token_ids=prompt)
            for method in ("ExtendSequence", "CommitSequence"):
                await self.call(method, sequence_id=sequence_id, num_tokens=len(prompt))
            await self.call("ReleaseSequence", sequence_id=sequence_id)

    def look_up(self, method: str, prompt: list[int]) -> bytes:
        """The message."""
        return getattr(pb, f"{method}Request")(**self._ids, token_ids=prompt).SerializeToString()

    async def seconds_of(self, method: str, message: bytes) -> float:
        """That the thread computes until the look-up is answered."""
        call = self._api.channel.unary_unary(f"/kvkeeper.cache.v1.CacheService/{method}")
        started = time.thread_time()
        await call(message, timeout=DEADLINE, metadata=self._metadata)
        return time.thread_time() - started


def run(seed: int) -> Counts:
    """Counts pairs of look-ups, and as faults those of the spy's own prompts that took longer than half of the others."""
    return asyncio.run(_run(random.Random(seed), _METHODS[seed % len(_METHODS)]))


def auc(ones: Sequence[float], others: Sequence[float]) -> float:
    """How often one of the ones is more than one of the others, where equal ones count half."""
    ordered = np.sort(others)
    below, up_to = (np.searchsorted(ordered, ones, side) for side in ("left", "right"))
    return float((below + up_to).mean() / (2 * len(others)))


async def _run(rng: random.Random, method: str) -> Counts:
    kinds = ("foreign", "own", "nowhere")
    prompts = {kind: [_prompt(rng) for _ in range(_NUM_PROMPTS)] for kind in kinds}
    times: dict[str, list[float]] = {kind: [] for kind in kinds}
    num_blocks = 2 * (_NUM_PROMPTS + 1) * _PROMPT_TOKENS
    with tempfile.TemporaryDirectory(prefix="kv") as folder:
        tokens = TokenFile(Path(folder) / "tokens")
        shown = [tokens.add(Caller(name, name, Role.ENGINE)) for name in ("victim", "spy")]
        async with serving(num_blocks=num_blocks, max_tokens_per_sequence=2 * _PROMPT_TOKENS, auth_tokens=tokens.path) as api:
            victim, spy = (_Tenant(api, token) for token in shown)
            for tenant, kind in ((victim, "foreign"), (spy, "own")):
                await tenant.open()
                await tenant.store(prompts[kind])
            for kind, tenant in (("own", spy), ("foreign", victim), ("nowhere", spy), ("foreign", spy)):
                found = (await tenant.call("MatchPrefix", token_ids=prompts[kind][0])).num_matched_tokens
                assert bool(found) == ((kind, tenant) in (("own", spy), ("foreign", victim))), f"{kind}: {found} tokens"
            messages = [{kind: spy.look_up(method, prompts[kind][number]) for kind in kinds} for number in range(_NUM_PROMPTS)]
            for number in range(_NUM_PAIRS):
                for kind in rng.sample(kinds, len(kinds)):
                    times[kind].append(await spy.seconds_of(method, messages[number % _NUM_PROMPTS][kind]))
            await api.audit()
    told, control = (auc(times[kind], times["nowhere"]) for kind in ("foreign", "own"))
    assert control >= LEAST_CONTROL, f"{method}: the control has an AUC of {control:.3f}"
    assert abs(told - 0.5) <= MOST_TOLD - 0.5, f"{method}: what another tenant has cached has an AUC of {told:.3f}"
    return Counts(_NUM_PAIRS, int((np.array(times["own"]) > np.median(times["nowhere"])).sum()), max(told, 1 - told))


def _prompt(rng: random.Random) -> list[int]:
    return [rng.randrange(*_TOKENS) for _ in range(_PROMPT_TOKENS)]
