"""Roots: which tree of the prefix index is whose.

Owns the numbers of roots and of tenants, both negative and given in order. Each scope (values/scopes.py) has a root of its own,
so that scopes share nothing; what is limited or cleared by tenant counts the tenant's number. Rules: a tenant has a root for
the base model without a salt before it has another one, and keeps both numbers for good, so tenants are bounded; any other
scope keeps its root as long as something is below it or needs it, and then until a new scope takes the number. A new scope
looks at a few roots, which bounds those without use by those in use.
"""

from collections import deque
from collections.abc import Callable
from hashlib import blake2b

import numpy as np

from ..values.scopes import get_tenant
from ..values.types import NO_TENANT, Int32Array, Int64Array
from .node_links import NO_NODE

MAX_TENANTS = 65_536
_LOOKS = 4  # at roots, for a new scope


class Roots:
    """The roots of one index: -1 to -len(scopes)."""

    def __init__(self, num_nodes: int) -> None:
        self.most = 2 * (MAX_TENANTS + num_nodes)  # more than can be in use at a time
        self.scopes: list[str | None] = []  # by number; None: what an earlier run has left there is not known
        self.tenants: dict[str, int] = {}  # numbers
        self.tenant_of: Int32Array = np.zeros(self.most + 1, np.int32)  # by -root
        self.seeds: Int64Array = np.zeros(self.most + 1, np.int64)  # by -root: digests of scopes
        self.is_idle: Callable[[int], bool] = lambda root: False  # whether nothing is below a root, and nothing needs it
        self._of_scope: dict[str, int] = {}
        self._others: deque[int] = deque()  # all but those that are kept for good

    def __len__(self) -> int:
        return len(self._of_scope)

    def find(self, scope: str) -> int:
        """The root of a scope, or NO_NODE (below which nothing is found) where it has none."""
        return self._of_scope.get(scope, NO_NODE)

    def scope(self, root: int) -> str:
        """The scope of a root in use."""
        found = self.scopes[-root - 1]
        assert found is not None, "a root of a known scope"
        return found

    def find_tenant(self, tenant: str) -> int:
        """The tenant's number, or NO_TENANT for one never seen."""
        return self.tenants.get(tenant, NO_TENANT)

    def has_room_for(self, scope: str) -> bool:
        """Whether the scope has a root or may get one."""
        is_known = get_tenant(scope) in self.tenants
        has_number = len(self.scopes) + 2 <= self.most or (is_known and self._find_idle(len(self._others)))
        return scope in self._of_scope or ((is_known or len(self.tenants) < MAX_TENANTS) and has_number)

    def add(self, scope: str, note: Callable[[int, str], bool]) -> int:
        """A root for a scope that has none. note(root, scope): it is written down; False where the root is to stay as it is."""
        if scope != get_tenant(scope) and self._find_idle(_LOOKS if len(self.scopes) < self.most else len(self._others)):
            root = self._others[0]
            self._others.rotate(-1)
            if note(root, scope):
                del self._of_scope[self.scope(root)]
                return self._give(root, scope)
        root = self.add_next(scope)
        note(root, scope)
        return root

    def add_next(self, scope: str | None) -> int:
        """The next number, for this scope; None: what an earlier run has left behind it is not known, not even whose it is."""
        self.scopes.append(None)
        root = -len(self.scopes)
        if scope is None:
            return root
        if scope != get_tenant(scope):
            self._others.append(root)
        return self._give(root, scope)

    def check(self) -> list[str]:
        """The broken invariants, one sentence each."""
        known = {scope: -place - 1 for place, scope in enumerate(self.scopes) if scope is not None}
        wrong = [] if known == self._of_scope else ["a scope and its root do not name each other"]
        if any(self.tenant_of[-root] != self.tenants.get(get_tenant(scope)) for scope, root in known.items()):
            wrong.append("a root is not of its scope's tenant")
        return wrong

    def _give(self, root: int, scope: str) -> int:
        self.scopes[-root - 1], self._of_scope[scope] = scope, root
        self.tenant_of[-root] = self.tenants.setdefault(get_tenant(scope), -len(self.tenants) - 1)
        self.seeds[-root] = int.from_bytes(blake2b(scope.encode(), digest_size=8).digest(), "little", signed=True)
        return root

    def _find_idle(self, num_looks: int) -> bool:
        """Looks at so many roots, in turn. Whether the first one is idle now."""
        for _ in range(min(num_looks, len(self._others))):
            if self.is_idle(self._others[0]):
                return True
            self._others.rotate(-1)
        return False
