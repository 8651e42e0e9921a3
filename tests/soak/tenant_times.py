"""Row 31: how long a look-up takes tells nothing of what another tenant has cached.

A spy looks up prompts that its victim has cached, prompts that it has cached itself, and prompts that are nowhere, in random
order. From the times of two kinds the AUC is made: how often a look-up of one took longer than one of the other, which is 1/2
where they tell nothing. The control: the spy tells its own prompts from those that are nowhere. What is counted is the time
that the thread of service and spy computes, with messages made before: what a busy machine adds, or where the spy's own lists
happen to lie, would only hide a difference or feign one.
"""

import random
import time
from collections.abc import Sequence

import numpy as np

from kvkeeper.cache.v1 import cache_service_pb2 as pb
from tests.soak.row import Counts
from tests.support.trust.tenant_calls import TenantCalls, tenants_served
from tests.support.worlds.cache_api import DEADLINE

MOST_TOLD, LEAST_CONTROL = 0.55, 0.95
_METHODS = ("MatchPrefix", "CheckAdmission", "ExplainMatch")  # by seed
_NUM_PAIRS = 2_500
_NUM_PROMPTS, _PROMPT_TOKENS = 25, 3_000
_TOKENS = 1 << 28, 1 << 30  # ids that are equally long in a message
_SPEC = pb.KvSpec(model_id="tiny", num_layers=1, num_kv_heads=1, head_dim=1, kv_dtype=pb.KV_DTYPE_FLOAT16, block_size=1,
                  layout=pb.KV_LAYOUT_BLOCK_MAJOR)  # fmt: skip


def auc(ones: Sequence[float], others: Sequence[float]) -> float:
    """How often one of the ones is more than one of the others, where equal ones count half."""
    ordered = np.sort(others)
    below, up_to = (np.searchsorted(ordered, ones, side) for side in ("left", "right"))
    return float((below + up_to).mean() / (2 * len(others)))


async def run(seed: int) -> Counts:
    """Counts pairs of look-ups, and as faults those of the spy's own prompts that took longer than half of the others."""
    rng, method = random.Random(seed), _METHODS[seed % len(_METHODS)]
    kinds = ("foreign", "own", "nowhere")
    prompts = {kind: [_prompt(rng) for _ in range(_NUM_PROMPTS)] for kind in kinds}
    times: dict[str, list[float]] = {kind: [] for kind in kinds}
    num_blocks = 2 * (_NUM_PROMPTS + 1) * _PROMPT_TOKENS
    sizes = {"num_blocks": num_blocks, "max_tokens_per_sequence": 2 * _PROMPT_TOKENS}
    async with tenants_served(("victim", "spy"), _SPEC, **sizes) as tenants:
        victim, spy = tenants["victim"], tenants["spy"]
        for tenant, kind in ((victim, "foreign"), (spy, "own")):
            for sequence_id, prompt in enumerate(prompts[kind], 1):
                await tenant.store(sequence_id, prompt)
                await tenant.call("ReleaseSequence", sequence_id=sequence_id)
        for kind, tenant in (("own", spy), ("foreign", victim), ("nowhere", spy), ("foreign", spy)):
            found = (await tenant.call("MatchPrefix", token_ids=prompts[kind][0])).num_matched_tokens
            assert bool(found) == ((kind, tenant) in (("own", spy), ("foreign", victim))), f"{kind}: {found} tokens"
        look_up = getattr(pb, f"{method}Request")
        messages = [
            {kind: look_up(**spy.ids, token_ids=prompts[kind][number]).SerializeToString() for kind in kinds}
            for number in range(_NUM_PROMPTS)
        ]
        for number in range(_NUM_PAIRS):
            for kind in rng.sample(kinds, len(kinds)):
                times[kind].append(await _seconds(spy, method, messages[number % _NUM_PROMPTS][kind]))
    told, control = (auc(times[kind], times["nowhere"]) for kind in ("foreign", "own"))
    assert control >= LEAST_CONTROL, f"{method}: the control has an AUC of {control:.3f}"
    assert abs(told - 0.5) <= MOST_TOLD - 0.5, f"{method}: what another tenant has cached has an AUC of {told:.3f}"
    return Counts(_NUM_PAIRS, int((np.array(times["own"]) > np.median(times["nowhere"])).sum()), max(told, 1 - told))


async def _seconds(spy: TenantCalls, method: str, message: bytes) -> float:
    """That the thread computes until a look-up is answered."""
    call = spy.api.channel.unary_unary(f"/kvkeeper.cache.v1.CacheService/{method}")
    started = time.thread_time()
    await call(message, timeout=DEADLINE, metadata=spy.metadata)
    return time.thread_time() - started


def _prompt(rng: random.Random) -> list[int]:
    return [rng.randrange(*_TOKENS) for _ in range(_PROMPT_TOKENS)]
