"""Fair shares: a tenant that floods the queue does not delay another beyond its share, under each policy."""

import numpy as np
import pytest

from kvkeeper.engine_service.scheduler.policies import POLICY_NAMES, make_ordering
from kvkeeper.engine_service.scheduler.waiting import FairShare, WaitingSequences
from kvkeeper.engine_service.values.request import Request
from tests.support.worlds.scheduler_world import World

pytestmark = pytest.mark.usefixtures("each_cache")


def request_of(tenant: str, length: int, max_new_tokens: int = 2, priority: int = 0) -> Request:
    return Request(tenant, np.ones(length, np.int32), max_new_tokens, tenant=tenant, priority=priority, look_up=False)


def world_of(policy: str, *, is_fair: bool = True, **options: int) -> World:
    waiting = WaitingSequences(make_ordering(policy), FairShare() if is_fair else None)
    return World(waiting=waiting, **{"max_running": 1, "num_blocks": 256, **options})


def tenants(world: World) -> str:
    return "".join(sequence.request.tenant for sequence in world.started)


@pytest.mark.parametrize("policy", POLICY_NAMES)
@pytest.mark.parametrize("is_fair", [True, False])
def test_a_flood_does_not_delay_another_tenant(policy: str, is_fair: bool) -> None:
    world = world_of(policy, is_fair=is_fair)
    for _ in range(30):
        world.submit(request_of("a", 6))
    for _ in range(10):
        world.step()
    num_before = len(world.started)
    world.submit(request_of("b", 6))
    world.run()
    num_overtaken = tenants(world).index("b") - num_before
    assert num_overtaken <= 1 if is_fair else num_overtaken > 20


@pytest.mark.parametrize("policy", POLICY_NAMES)
def test_shares_are_of_tokens_not_of_requests(policy: str) -> None:
    world = world_of(policy)
    for _ in range(12):
        world.submit(request_of("a", 8, 1))
    for _ in range(48):
        world.submit(request_of("b", 1, 1))
    served = {"a": 0, "b": 0}
    while len(world.started) < 40:
        world.step()
    world.run()
    for started in world.started[:40]:
        served[started.request.tenant] += len(started.request.prompt) + 2 * started.request.max_new_tokens
        assert abs(served["a"] - served["b"]) <= 10 + 3, "what one of them can have running"
    world.check_outputs()


def test_priorities_come_before_shares_and_old_ones_of_a_tenant_that_was_served_most_still_start() -> None:
    world = world_of("priority")
    world.submit(request_of("a", 9, 9))
    world.step()
    for tenant, priority in (("b", 0), ("a", 100), ("c", -100)):
        world.submit(request_of(tenant, 3, priority=priority))
    world.run()
    assert tenants(world) == "aabc"
    low = world.submit(request_of("c", 3, priority=-100))
    for _ in range(400):
        if low.num_new_tokens:
            break
        world.submit(request_of("b", 3))
        world.now += 0.1
        world.step()
    assert low.num_new_tokens, "a level for each ten seconds without a start"
    assert 9 < world.now - low.arrived_at < 12


def test_a_tenant_that_comes_back_has_saved_nothing_up() -> None:
    shares = FairShare()
    shares.join("a", 0.0)
    shares.join("b", 0.0)
    shares.start("a", 1000, 0.0)
    shares.leave("b")
    shares.charge("a", 50)
    shares.join("b", 5.0)
    assert shares.served("b") == shares.served("a") == 1100


def test_tenants_that_are_gone_are_forgotten() -> None:
    shares = FairShare()
    shares.join("stays", 0.0)
    for place in range(1000):
        shares.join(f"t{place}", 0.0)
        shares.leave(f"t{place}")
        shares.start("stays", 1, 0.0)
    assert len(shares._served) < 200


def test_however_many_tenants_come_once_each_is_served() -> None:
    world = world_of("fcfs", max_running=4)
    for place in range(80):
        world.submit(request_of(f"t{place}", 1))
        world.step()
    world.run()
    world.check_outputs()


def test_a_refused_start_of_a_tenant_that_is_served_more_keeps_its_place() -> None:
    world = world_of("sjf", num_blocks=9, max_running=8, block_size=16)
    world.submit(request_of("a", 1, 12))
    world.step()
    world.hold_blocks(7)  # all others
    world.submit(request_of("a", 12))
    world.step()
    world.submit(request_of("b", 1))
    for _ in range(4):
        world.step()
    shares = world.scheduler.waiting.shares
    assert shares is not None
    assert shares.served("b") < shares.served("a")
    world.release_held_blocks()
    world.run()
    assert tenants(world) == "aab"


def test_starts_of_one_step_take_turns() -> None:
    world = world_of("fcfs", max_running=6)
    for tenant in "aaabbb":
        world.submit(request_of(tenant, 4))
    world.step()
    assert tenants(world) == "ababab"
