"""What is looked up, loaded and stored, and when: the scheduler's side, without vLLM, time or a connection.

Rules: only whole blocks move. A hit leaves one token of the prompt to compute. A prompt is stored when the step that computes
its last token has run, and what was generated when the request has ended; vLLM holds the blocks of an ended request until all
its stores are reported. Blocks whose load has not ended are never stored: they may hold anything. What could not be loaded is
computed, not loaded again, and stored like any other prompt.
"""

from collections.abc import Iterable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import Protocol

from kvkeeper.vllm.orders import Load, Orders, Scope, Store, TokenIds


class Lookups(Protocol):
    """How many tokens of a prompt are cached."""

    def ask(self, request_id: str, token_ids: TokenIds, scope: Scope) -> None:
        """Look it up; again, if it was asked before."""

    def answer(self, request_id: str) -> int | None:
        """Tokens that are cached, 0 where the service cannot say; None: there is no answer yet."""

    def forget(self, request_id: str) -> None:
        """Nothing will be asked of it any more."""


@dataclass(frozen=True, slots=True)
class Scheduled:
    """A request in a step. num_tokens: computed once the step has run. block_ids: all of its blocks, or those added to them."""

    request_id: str
    num_tokens: int
    block_ids: Sequence[int]
    is_whole_table: bool


@dataclass(slots=True)
class _Request:
    """A request that vLLM has, with what is known of its blocks."""

    token_ids: TokenIds  # of the prompt
    scope: Scope
    block_ids: list[int] = field(default_factory=list)
    num_own: int = 0  # tokens that vLLM had of its own at the last look-up
    num_kept: int = 0  # blocks that the service has, or was given
    loading: frozenset[int] = frozenset()  # vLLM's blocks that a load was ordered for, until the request is in a step
    is_prompt_done: bool = False
    is_stored: bool = False  # whether a store was ever ordered


class Planner:
    """The requests of one scheduler."""

    def __init__(self, block_size: int, lookups: Lookups, *, store_generated: bool = True) -> None:
        self._block_size = block_size
        self._lookups = lookups
        self._store_generated = store_generated
        self._requests: dict[str, _Request] = {}
        self._orders = Orders()

    def arrive(self, request_id: str, token_ids: TokenIds, scope: Scope) -> None:
        """A prompt came. Prompts that came together are looked up together."""
        if request_id not in self._requests and len(token_ids) > self._block_size:
            self._requests[request_id] = _Request(token_ids, scope)
            self._lookups.ask(request_id, token_ids, scope)

    def match(self, request_id: str, num_own: int) -> int | None:
        """Tokens that can be loaded behind the num_own that vLLM has itself; None: not known yet."""
        request = self._requests.get(request_id)
        if request is None or num_own % self._block_size or request.loading:
            return 0  # a request that was loaded and asks again has lost all of it
        found = self._lookups.answer(request_id)
        if found is None:
            return None
        request.num_own = num_own
        request.num_kept = found // self._block_size
        most = (len(request.token_ids) - 1) // self._block_size
        return max(0, min(request.num_kept, most) * self._block_size - num_own)

    def allocate(self, request_id: str, block_ids: Sequence[int], num_tokens: int) -> None:
        """vLLM gave a request its blocks, num_tokens of which are to be loaded behind those that it had itself."""
        request = self._requests.get(request_id)
        if request is None or num_tokens < self._block_size:
            return
        first, num_blocks = request.num_own // self._block_size, num_tokens // self._block_size
        end = first + num_blocks
        request.loading = frozenset(block_ids[first:end])
        self._orders.loads.append(
            Load(request_id, request.scope, request.token_ids[: end * self._block_size], first, list(block_ids[first:end]))
        )

    def fail(self, block_ids: AbstractSet[int]) -> None:
        """These blocks of vLLM's could not be loaded: the service may have lost what it had."""
        for request in self._requests.values():
            if not request.loading.isdisjoint(block_ids):
                request.num_kept = 0

    def step(self, scheduled: Iterable[Scheduled], preempted: Iterable[str] = ()) -> Orders:
        """The orders that go with this step of vLLM."""
        for request_id in preempted:
            if (gone := self._requests.get(request_id)) is not None:
                gone.block_ids = []
                self._orders.preempted.append(request_id)
        for row in scheduled:
            request = self._requests.get(row.request_id)
            if request is None:
                continue
            request.loading = frozenset()
            request.block_ids = list(row.block_ids) if row.is_whole_table else [*request.block_ids, *row.block_ids]
            if not request.is_prompt_done and row.num_tokens >= len(request.token_ids):
                request.is_prompt_done = True
                self._store(row.request_id, request, request.token_ids, request.block_ids)
        orders, self._orders = self._orders, Orders()
        return orders

    def finish(self, request_id: str, token_ids: TokenIds, num_computed: int, block_ids: Sequence[int]) -> bool:
        """A request has ended with these tokens. Whether vLLM is to hold its blocks until they are reported."""
        request = self._requests.pop(request_id, None)
        if request is None:
            return False
        self._lookups.forget(request_id)
        if request.loading:
            return False  # vLLM holds the blocks until the load is reported, and they may hold anything
        if self._store_generated and request.is_prompt_done:
            # The last token was drawn, not computed.
            self._store(request_id, request, token_ids[: max(0, min(num_computed, len(token_ids) - 1))], block_ids)
        if request.is_stored:
            self._orders.held.append(request_id)
        return request.is_stored

    def _store(self, request_id: str, request: _Request, token_ids: TokenIds, block_ids: Sequence[int]) -> None:
        """Orders a store of the whole blocks of these tokens, unless the service has them."""
        num_blocks = min(len(token_ids) // self._block_size, len(block_ids))
        if num_blocks > request.num_kept:
            request.num_kept, request.is_stored = num_blocks, True
            tokens = token_ids[: num_blocks * self._block_size]
            self._orders.stores.append(Store(request_id, request.scope, tokens, list(block_ids[:num_blocks])))
