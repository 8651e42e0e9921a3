"""A worker of vLLM's without vLLM, on a real cache service: the bytes of its blocks spell the prefix that they end."""

import hashlib
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from kvkeeper.cache.v1 import cache_service_pb2 as pb
from kvkeeper.client.arena import Arena
from kvkeeper.vllm.backoff import Backoff
from kvkeeper.vllm.orders import Load, Orders, Scope, Store, TokenIds
from kvkeeper.vllm.page_spec import Facts, Part, make_spec
from kvkeeper.vllm.pages import HostPages, Pages
from kvkeeper.vllm.rounds import Link, Rounds
from kvkeeper.vllm.transfers import Finished, Transfers

BLOCK_SIZE = 4
NUM_BLOCKS = 24
BLOCK_BYTES = 32
PARTS = [Part("0", "u1", (BLOCK_BYTES // 2,), BLOCK_BYTES // 2), Part("1", "u1", (BLOCK_BYTES // 2,), BLOCK_BYTES // 2)]
FACTS = Facts(
    model="toy",
    revision="1",
    config="{}",
    dtype="u1",
    cache_dtype="auto",
    backend="",
    block_size=BLOCK_SIZE,
    vllm_version="0",
    ranks={"tp": (0, 2)},
    parts=PARTS,
)
SPEC = make_spec(FACTS)
DEADLINE_S = 10.0

NO_SCOPE = Scope()


def other_rank() -> pb.KvSpec:
    return make_spec(replace(FACTS, ranks={"tp": (1, 2)}))


def tokens_of(num_blocks: int, *, first: int = 0) -> TokenIds:
    return np.arange(first, first + num_blocks * BLOCK_SIZE, dtype=np.int32)


def content(token_ids: TokenIds, block_idx: int) -> bytes:
    """What a model would compute for a block: a hash of all tokens up to its end."""
    return hashlib.sha256(token_ids[: (block_idx + 1) * BLOCK_SIZE].tobytes()).digest()


class Worker:
    """Blocks [NUM_BLOCKS, BLOCK_BYTES] and the transfers of one worker."""

    def __init__(
        self,
        address: str,
        spec: pb.KvSpec = SPEC,
        *,
        wrap: Callable[[Pages], Pages] = lambda pages: pages,
        now: Callable[[], float] | None = None,
        lease_s: float = 30.0,
        timeout_s: float = 5.0,
    ) -> None:
        """wrap: stands between the transfers and the copies. now: the clock of the pauses."""
        self.blocks = np.zeros((NUM_BLOCKS, BLOCK_BYTES), np.uint8)
        halves = [self.blocks[:, : BLOCK_BYTES // 2], self.blocks[:, BLOCK_BYTES // 2 :]]

        def make_pages(arena: Arena) -> Pages:
            return wrap(HostPages(arena.array, halves, PARTS))

        def connect() -> Link:
            """A session of its own."""
            return Link.connect(address, spec, make_pages, lease_s=lease_s, timeout_s=timeout_s, name="toy")

        self.connect = connect
        clock = {} if now is None else {"now": now}
        self.rounds = Rounds(connect, BLOCK_SIZE, Backoff(1.0, 4.0), **clock)
        self.transfers = Transfers(self.rounds, renew_s=lease_s / 3)
        self._failed: set[int] = set()

    def compute(self, token_ids: TokenIds, block_ids: Sequence[int]) -> None:
        """What a step of the model writes."""
        for block_idx, block_id in enumerate(block_ids):
            self.blocks[block_id] = np.frombuffer(content(token_ids, block_idx), np.uint8)

    def order_store(self, request_id: str, token_ids: TokenIds, block_ids: Sequence[int], scope: Scope = NO_SCOPE) -> None:
        """Compute the blocks, and hand their store to the transfers."""
        self.compute(token_ids, block_ids)
        self.transfers.submit(Orders(stores=[Store(request_id, scope, token_ids, list(block_ids))]))

    def store(self, request_id: str, token_ids: TokenIds, block_ids: Sequence[int], scope: Scope = NO_SCOPE) -> None:
        """The same, and wait for its end."""
        self.order_store(request_id, token_ids, block_ids, scope)
        assert self.transfers.wait(DEADLINE_S)

    def load(
        self, request_id: str, token_ids: TokenIds, block_ids: Sequence[int], first_block: int = 0, scope: Scope = NO_SCOPE
    ) -> Finished:
        """Load into blocks, and wait for the end; block_ids: those behind first_block."""
        self.transfers.submit(Orders(loads=[Load(request_id, scope, token_ids, first_block, list(block_ids))]))
        assert self.transfers.wait(DEADLINE_S)
        return self.transfers.take_finished()

    def holds(self, token_ids: TokenIds, block_ids: Sequence[int], first_block: int = 0) -> list[bool]:
        """Of each block, whether it is what a model would have computed."""
        return [
            self.blocks[block_id].tobytes() == content(token_ids, first_block + row) for row, block_id in enumerate(block_ids)
        ]

    def close(self) -> None:
        self.transfers.close(DEADLINE_S)


class Gate:
    """Pages that stop before a copy until they are let go on."""

    def __init__(self, pages: Pages) -> None:
        self._pages = pages
        self.reached, self.open = threading.Event(), threading.Event()
        self.fault: Exception | None = None

    def load(self, page_ids: Sequence[int], block_ids: Sequence[int]) -> None:
        self._pass()
        self._pages.load(page_ids, block_ids)

    def store(self, block_ids: Sequence[int], page_ids: Sequence[int]) -> None:
        self._pass()
        self._pages.store(block_ids, page_ids)

    def close(self) -> None:
        self._pages.close()

    def _pass(self) -> None:
        self.reached.set()
        assert self.open.wait(DEADLINE_S)
        if self.fault is not None:
            raise self.fault
