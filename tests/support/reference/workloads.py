"""Generated prefix-sharing workloads, by seed: what policies are measured on besides recorded traces.

A request is a list of block contents as numbers; equal numbers are equal prefixes, as in a Mooncake trace. The kinds differ
in what decides whether a prefix returns: nothing (scan), the place in a cycle (loop, scan_in_loop), popularity (zipf), recency,
being a conversation's last turn (multi_turn), a tool call that returns soon (agents), a document that is asked about for a
while (rag), the tenant (tenants, loop_beside_chat), or something that changes (drift, shift, phases, turns_of_phases).
"""

import itertools
import random
from collections.abc import Callable, Iterator

Requests = list[list[int]]

_MOST_TURN_BLOCKS = 36


def scan(
    seed: int, *, num_documents: int = 50, length: int = 8, between: int = 200, burst: int = 60, skew: float = 1.0
) -> Requests:
    """Popular documents, and every so many requests a burst of documents that are read once."""
    rng, fresh = random.Random(seed), itertools.count(10**6)
    requests: Requests = []
    for _ in range(10):
        requests.extend([*_document(d, length), next(fresh)] for d in _draw(rng, num_documents, skew, between))
        requests.extend(list(itertools.islice(fresh, length)) for _ in range(burst))
    return requests


def loop(seed: int, *, num_documents: int = 100, length: int = 8, num_requests: int = 2000) -> Requests:
    """The same documents in the same order, again and again; the seed moves the start."""
    return [_document((i + seed) % num_documents, length) for i in range(num_requests)]


def scan_in_loop(seed: int, *, num_documents: int = 150, length: int = 8, every: int = 15) -> Requests:
    """Documents in the same order, again and again, and every so many requests a few that are read once."""
    fresh = itertools.count(10**6)
    requests: Requests = []
    for number, request in enumerate(loop(seed, num_documents=num_documents, length=length)):
        requests.append(request)
        if number % every == 0:
            requests.extend(list(itertools.islice(fresh, length)) for _ in range(3))
    return requests


def zipf(
    seed: int, *, num_documents: int = 600, length: int = 8, tail: int = 2, skew: float = 0.9, num_requests: int = 2500
) -> Requests:
    """One system prompt, documents by popularity, and a question of its own for each request."""
    rng, fresh = random.Random(seed), itertools.count(10**6)
    drawn = _draw(rng, num_documents, skew, num_requests)
    return [[0, *(1 + block for block in _document(d, length)), *itertools.islice(fresh, tail)] for d in drawn]


def multi_turn(
    seed: int, *, num_users: int = 40, first: int = 6, growth: int = 4, goes_on: float = 0.75, num_requests: int = 2500
) -> Requests:
    """Users who repeat all of their conversation with each turn, and begin another now and then."""
    rng, fresh = random.Random(seed), itertools.count(1)
    talks: Requests = [[] for _ in range(num_users)]
    requests: Requests = []
    for _ in range(num_requests):
        user = rng.randrange(num_users)
        if not talks[user] or rng.random() > goes_on or len(talks[user]) > _MOST_TURN_BLOCKS:
            talks[user] = [0, *itertools.islice(fresh, first)]
        else:
            talks[user] = [*talks[user], *itertools.islice(fresh, rng.randint(1, 2 * growth - 1))]
        requests.append(talks[user])
    return requests


def shift(
    seed: int, *, num_documents: int = 400, length: int = 6, skew: float = 1.0, phase: int = 700, num_phases: int = 5
) -> Requests:
    """Documents by popularity, all of them replaced by others at once, several times."""
    rng, fresh = random.Random(seed), itertools.count(10**7)
    requests: Requests = []
    for number in range(num_phases):
        drawn = _draw(rng, num_documents, skew, phase)
        requests.extend([*_document(number * num_documents + d, length), next(fresh)] for d in drawn)
    return requests


def drift(seed: int, *, window: int = 60, length: int = 6, speed: float = 0.1, num_requests: int = 3500) -> Requests:
    """Documents in a window that moves on all the time: the more uses one had, the nearer its end."""
    rng = random.Random(seed)
    return [_document(int(i * speed + rng.expovariate(1 / window)), length) for i in range(num_requests)]


def recency(seed: int, *, length: int = 6, decay: float = 0.03, new: float = 0.2, num_requests: int = 2500) -> Requests:
    """Reuse depends on how recently a document was used, and on nothing else: nothing beats LRU here but luck."""
    rng, stack, fresh = random.Random(seed), [0], itertools.count(1)
    requests: Requests = []
    for _ in range(num_requests):
        if rng.random() < new:
            stack.insert(0, next(fresh))
        else:
            stack.insert(0, stack.pop(min(int(rng.expovariate(decay)), len(stack) - 1)))
        requests.append(_document(stack[0], length))
    return requests


def agents(seed: int, *, num_at_once: int = 12, num_tools: int = 5, steps: int = 8, num_requests: int = 2000) -> Requests:
    """Agents under a few tool prompts, each with many short steps; between them questions that are not asked again."""
    rng, fresh = random.Random(seed), itertools.count(10**6)
    running: Requests = []
    requests: Requests = []
    while len(requests) < num_requests:
        if len(running) < num_at_once:
            running.append([*_document(rng.randrange(num_tools), 10), *itertools.islice(fresh, 3)])
        if rng.random() < 0.4:
            requests.append(list(itertools.islice(fresh, rng.randint(4, 24))))
        which = rng.randrange(len(running))
        requests.append(running[which])
        running[which] = [*running[which], *itertools.islice(fresh, rng.randint(1, 3))]
        if rng.random() < 1 / steps or len(running[which]) > _MOST_TURN_BLOCKS:
            del running[which]
    return requests


def rag(seed: int, *, num_open: int = 15, length: int = 12, num_requests: int = 2000) -> Requests:
    """Documents under one system prompt: each is asked about a few times in a row of its own, then never again."""
    rng, fresh = random.Random(seed), itertools.count(10**6)
    requests: Requests = []
    documents = list(range(num_open))
    for number in range(num_requests):
        which = rng.randrange(num_open)
        requests.append([0, 1, *(2 + block for block in _document(documents[which], length)), *itertools.islice(fresh, 2)])
        if rng.random() < 0.3:
            documents[which] = num_open + number
    return requests


def tenants(seed: int) -> Requests:
    """Conversations of one tenant, documents of another, a third that reads everything once, each on its own contents."""
    rng = random.Random(seed)
    fresh = itertools.count(10**9)
    left = [iter(multi_turn(seed)), iter(zipf(seed))]
    requests: Requests = []
    for _ in range(2200):
        kind = rng.randrange(3)
        one = list(itertools.islice(fresh, 10)) if kind == 2 else next(left[kind])
        requests.append([block + kind * 10**8 for block in one])
    return requests


def loop_beside_chat(seed: int) -> Requests:
    """One tenant reads the same documents in turn, one has conversations, a third asks what is not asked again."""
    rng = random.Random(seed)
    fresh = itertools.count(10**9)
    left = [iter(loop(seed, num_documents=60)), iter(multi_turn(seed))]
    requests: Requests = []
    for _ in range(2400):
        kind = rng.randrange(5)
        one = list(itertools.islice(fresh, 10)) if kind == 4 else next(left[kind % 2])
        requests.append([block + kind % 2 * 10**8 for block in one])
    return requests


def turns_of_phases(seed: int) -> Requests:
    """Recency and cycles in turn, each twice: where LRU is best, and where it has nothing."""
    kinds = (recency(seed), loop(seed, num_documents=180), recency(seed + 1), loop(seed, num_documents=240))
    return [[block + number * 10**8 for block in request] for number, kind in enumerate(kinds) for request in kind[:1500]]


def phases(seed: int) -> Requests:
    """A different kind of workload after another, on other contents: what was learned in one is wrong in the next."""
    kinds: tuple[Requests, ...] = (zipf(seed), loop(seed), recency(seed), scan(seed), multi_turn(seed))
    return [[block + number * 10**8 for block in request] for number, kind in enumerate(kinds) for request in kind[:1000]]


WORKLOADS: dict[str, Callable[[int], Requests]] = {
    "scan": scan,
    "loop": loop,
    "scan_in_loop": scan_in_loop,
    "zipf": zipf,
    "multi_turn": multi_turn,
    "shift": shift,
    "drift": drift,
    "recency": recency,
    "agents": agents,
    "rag": rag,
    "tenants": tenants,
    "loop_beside_chat": loop_beside_chat,
    "turns_of_phases": turns_of_phases,
    "phases": phases,
}


def _document(number: int, length: int) -> list[int]:
    return list(range(number * length, (number + 1) * length))


def _draw(rng: random.Random, count: int, skew: float, num_draws: int) -> Iterator[int]:
    return iter(rng.choices(range(count), [1 / (rank + 1) ** skew for rank in range(count)], k=num_draws))
