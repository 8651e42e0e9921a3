"""Which evicted blocks are copied to the host tier: all, until it is seen that copies do not come back."""

import pytest

from kvkeeper.cache_service.core.tiers.admission import HostAdmission
from tests.benchmarks.tier_replay import TierSizes, replay_tiers
from tests.support.reference.workloads import WORKLOADS
from tests.support.slices import todays


def copies(admission: HostAdmission, num_runs: int, returned: int) -> int:
    """How many of so many runs of 16 evicted blocks are copied, where so many of each copied run come back."""
    num_copied = 0
    for _ in range(num_runs):
        if admission.admits(16):
            num_copied += 1
            admission.note_copied(16)
            admission.note_returned(returned)
    return num_copied


def test_what_comes_back_is_copied() -> None:
    assert copies(HostAdmission(100), 5000, returned=2) == 5000


def test_what_never_comes_back_is_copied_on_trial_alone() -> None:
    assert 0 < copies(HostAdmission(100), 5000, returned=0) < 250


def test_a_load_that_changes_is_noticed() -> None:
    admission = HostAdmission(100)
    assert copies(admission, 5000, returned=0) < 250
    assert copies(admission, 5000, returned=12) > 4000
    assert copies(admission, 9000, returned=0) < 2000


def test_a_load_without_reuse_copies_next_to_nothing() -> None:
    requests = [list(range(start, start + 16)) for start in range(0, 20_000, 16)]
    found = replay_tiers(requests, TierSizes(256, 1024), "adaptive")
    assert 512 <= found.num_to_host < 0.06 * found.num_blocks


def test_all_that_is_evicted_is_copied_where_a_disk_stores_all_that_comes_to_the_host_tier() -> None:
    requests, sizes = [list(range(start, start + 16)) for start in range(0, 6000, 16)], TierSizes(256, 512, 20_000)
    found = replay_tiers([*requests, *requests], sizes, "adaptive")
    assert found.num_to_disk >= 5700
    assert found.num_disk_hits + found.num_device_hits + found.num_host_hits == 6000


def test_the_host_tier_decides_where_a_disk_stores_what_is_used_twice() -> None:
    requests = [list(range(start, start + 16)) for start in range(0, 12_000, 16)]
    found = replay_tiers(requests, TierSizes(256, 512, 20_000), "adaptive", on_second_use=True)
    assert 512 <= found.num_to_host < 0.15 * found.num_blocks


@pytest.mark.parametrize("name", todays(["multi_turn", "agents"], 1))
def test_a_load_with_reuse_keeps_its_hits(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    requests, sizes = WORKLOADS[name](0), TierSizes(100, 400)
    found = replay_tiers(requests, sizes, "adaptive")
    monkeypatch.setattr(HostAdmission, "pays", True)
    of_all = replay_tiers(requests, sizes, "adaptive")
    assert of_all.num_host_hits > 5000
    assert found.num_hits >= 0.98 * of_all.num_hits
