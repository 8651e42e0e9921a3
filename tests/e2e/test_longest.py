"""How long sequences get: as long as the pool holds and the model can make them; and where the bound is reported."""

import pytest
import structlog

from tests.support.processes.service_pair import BLOCK_SIZE, Services, generate
from tests.support.worlds.cache_api import failure


async def test_a_sequence_may_fill_the_pool_without_a_flag(world: Services) -> None:
    num_tokens = 4800
    client = await world.serve(cache={"num_blocks": 1 + num_tokens // BLOCK_SIZE, "pool_memory": 4 << 20})
    assert (await client.model()).max_tokens_per_sequence == num_tokens
    output = await generate(client, [1 + place % 7 for place in range(num_tokens - 2)], max_tokens=2)
    assert len(output.token_ids[0]) == 2


@pytest.mark.parametrize(
    ("cache", "engine", "named"),
    [
        ({"num_blocks": 9}, {}, "--pool-memory"),
        ({"num_blocks": 64, "max_tokens_per_sequence": 32}, {}, "--max-tokens-per-sequence of the cache service"),
        ({"num_blocks": 64}, {"max_tokens_per_sequence": 32}, "--max-tokens-per-sequence of the engine service"),
    ],
)
async def test_the_bound_is_reported_at_start_and_to_a_client_that_asks_for_more(
    world: Services, cache: dict[str, int], engine: dict[str, int], named: str
) -> None:
    await world.start_cache(**cache)
    with structlog.testing.capture_logs() as logs:
        client = await world.client(await world.start_engine(**engine))
    (told,) = [line for line in logs if line["event"] == "shorter_than_model"]
    assert (told["log_level"], told["max_tokens_per_sequence"]) == ("warning", 32)
    assert named in told["message"]
    refused = await failure(generate(client, list(range(1, 31)), max_tokens=8))
    assert (refused.reason, refused.metadata) == ("NEVER_FITS", {"requested": "38", "limit": "32"})
    assert named in refused.message


@pytest.mark.parametrize("fronts", [0, 1])
async def test_the_longest_prompt_comes_whatever_its_tokens_are(world: Services, fronts: int) -> None:
    """More than 4 MiB, because an id may take 5 bytes; what is wrong with it is not its length."""
    most = 1 << 20  # all that the toy has positions for
    client = await world.serve(fronts=fronts, cache={"num_blocks": 1 + most // BLOCK_SIZE, "pool_memory": 4 << 20})
    assert (await client.model()).max_tokens_per_sequence == most
    assert (await failure(generate(client, [2**31 - 1] * (most - 1), max_tokens=1))).reason == "WRONG_TOKEN_ID"
    refused = await failure(generate(client, [1] * most, max_tokens=1))
    assert (refused.reason, refused.metadata["limit"]) == ("NEVER_FITS", str(most))
    refused = await failure(generate(client, [2**31 - 1] * (4 * most), max_tokens=1))
    assert (refused.reason, refused.metadata["field"]) == ("INVALID_FIELD", "request")
