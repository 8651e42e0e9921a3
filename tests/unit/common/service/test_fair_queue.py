"""Clients take turns, none gets all the workers, and a job that would wait too long is refused."""

import pytest

from kvkeeper.common.service.fair_queue import FairQueue, TooManyWaiting


def queue(max_waiting: int = 8, max_waiting_each: int = 4, max_busy_each: int = 8) -> FairQueue[str]:
    return FairQueue(max_waiting=max_waiting, max_waiting_each=max_waiting_each, max_busy_each=max_busy_each)


def jobs_taken(jobs: FairQueue[str]) -> list[str]:
    found = []
    while (one := jobs.take_job()) is not None:
        found.append(one[1])
    return found


def test_clients_take_turns() -> None:
    jobs = queue()
    for job in ("a1", "a2", "a3", "b1", "c1", "b2"):
        jobs.put(job[0], job)
    assert jobs_taken(jobs) == ["a1", "b1", "c1", "a2", "b2", "a3"]
    assert jobs.num_waiting == 0


def test_a_client_that_comes_late_is_not_behind_the_many_of_another() -> None:
    jobs = queue()
    for job in ("a1", "a2", "a3"):
        jobs.put("a", job)
    assert jobs.take_job() == ("a", "a1")
    jobs.put("b", "b1")
    assert jobs_taken(jobs) == ["a2", "b1", "a3"]


def test_one_client_never_has_all_the_workers() -> None:
    jobs = queue(max_busy_each=1)
    for job in ("a1", "a2", "b1"):
        jobs.put(job[0], job)
    assert jobs_taken(jobs) == ["a1", "b1"], "the second of a waits, although there is nothing else to do"
    jobs.end_job("b")
    assert jobs.take_job() is None
    jobs.end_job("a")
    assert jobs.take_job() == ("a", "a2")


@pytest.mark.parametrize(("clients", "limit"), [("aaaa", 4), ("aaabbbcc", 8)])
def test_what_would_wait_too_long_is_refused(clients: str, limit: int) -> None:
    jobs = queue()
    for client in clients:
        jobs.put(client, client)
    with pytest.raises(TooManyWaiting) as refused:
        jobs.put("a", "one more")
    assert refused.value.limit == limit
    assert jobs.num_waiting == len(clients)
    assert jobs.take_job() == ("a", "a")
    jobs.put("d" if limit == 8 else "a", "has room again")


def test_a_job_that_is_not_wanted_any_more_leaves() -> None:
    jobs = queue()
    for job in ("a1", "a2", "b1"):
        jobs.put(job[0], job)
    jobs.remove("a", "a1")
    jobs.remove("b", "b1")
    jobs.remove("c", "c1")
    assert jobs.num_waiting == 1
    assert jobs_taken(jobs) == ["a2"]
    jobs.remove("a", "a2")
    assert jobs.num_waiting == 0
