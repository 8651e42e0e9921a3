"""What simulations with tiers let happen next: two engines create, step, report and end, and what they left ends later."""

from kvkeeper.cache_service.core.values.types import Executor, SessionId
from tests.support.tiers.tier_world import TierWorld
from tests.support.worlds.engine_model import Choose


def any_session(world: TierWorld, choose: Choose) -> SessionId:
    """One of two; an engine that died has come back."""
    while len(world.engines) < 2:
        world.open(Executor.ENGINE)
    return list(world.engines)[choose(2)]


def act(world: TierWorld, session: SessionId, event: int, choose: Choose) -> None:
    """event: below 100; from 22 on it is a step."""
    if event < 12 or not world.engines[session].sequences:
        world.create(session, choose)
    elif event < 14:
        world.close(session, may_still_write=bool(choose(2)))
    elif event < 20 and world.ended:
        (world.run_ended if choose(3) else world.end_quarantine)(world.ended[choose(len(world.ended))])
    elif event < 22:
        world.report(session, choose)
    else:
        world.step(session, choose)
