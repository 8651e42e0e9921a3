"""ClusterLink: a Valkey or Redis cluster: which node has which key is the client library's to know, and to learn again.

A batch is divided by node, goes out to all, and then their answers are read, on sockets of our own for each node. Rules: a
command that a node sends elsewhere (MOVED, ASK) goes again through the library, which follows, and which knows better
afterwards; a node that fails is not asked for a while, longer each time, and the library asks the others who stands in for it;
what lies on such a node is not there, and the rest of the batch counts. Keys are independent: no two of them share a slot by
design, so a node that is gone ends a hit at the first block that it has.
"""

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import structlog
from redis.backoff import NoBackoff
from redis.cluster import ClusterNode, RedisCluster, get_node_name
from redis.exceptions import SlotNotCoveredError
from redis.retry import Retry

from .bulk_connection import BulkConnection, BulkConnections, Part, Received, Refusal
from .redis_link import UNANSWERED, Reply, Silence, guarded, library_options
from .remote_address import Node, RemoteAddress, RemoteSecret
from .remote_store import ServerError

log = structlog.get_logger()

_FIRST_REST, _LONGEST_REST = 1.0, 30.0  # seconds
_NUM_RETRIES = 1  # of the library, after it has asked anew who has what
_ELSEWHERE = ("MOVED ", "ASK ", "TRYAGAIN ")


class _OfNode:
    """Sockets to one node, and whether it is asked."""

    def __init__(self, bulk: BulkConnections) -> None:
        self.bulk = bulk
        self.rest = _FIRST_REST
        self.until: float | None = None  # since it has failed it is not asked before this


class ClusterLink:
    """One cluster. The library's client is made when it is first needed, and anew where it knows no living node any more."""

    def __init__(
        self, address: RemoteAddress, secret: RemoteSecret, timeout: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """timeout: seconds of one answer."""
        self._address, self._secret, self._timeout, self._clock = address, secret, timeout, clock
        self._nodes: dict[Node, _OfNode] = {}
        self._client: RedisCluster | None = None
        self._lock = threading.Lock()  # of the nodes
        self._making = threading.Lock()

    def control(self) -> Any:
        with self._making:
            if self._client is None:
                self._client = RedisCluster(
                    startup_nodes=[ClusterNode(node.host, node.port) for node in self._address.nodes],
                    require_full_coverage=False,
                    retry=Retry(NoBackoff(), _NUM_RETRIES),
                    **library_options(self._address, self._secret, self._timeout),
                )
            return self._client

    def exchange(self, commands: Sequence[Sequence[Part]], into: Sequence[Sequence[memoryview]] = ()) -> list[Reply]:
        return guarded(lambda: self._exchange(self.control(), commands, into))

    def _exchange(self, client: Any, commands: Sequence[Sequence[Part]], into: Sequence[Sequence[memoryview]]) -> list[Reply]:
        nothing: Sequence[memoryview] = ()
        buffers = [nothing] * (len(commands) - len(into)) + list(into)
        replies: list[Reply] = [Silence(was_asked=False)] * len(commands)
        lost: list[Node] = []
        waiting: list[tuple[Node, BulkConnection, list[int]]] = []
        for node, places in self._divided(client, commands).items():
            connection = self._send(node, [commands[place] for place in places])
            if connection is not None:
                waiting.append((node, connection, places))
                continue
            lost.append(node)
            for place in places:
                replies[place] = Silence(was_asked=True)
        for node, connection, places in waiting:
            found = self._receive(node, connection, [buffers[place] for place in places])
            lost += [] if found else [node]
            for at, place in enumerate(places):
                replies[place] = found[at] if found else Silence(was_asked=True)
        for place, reply in enumerate(replies):
            if isinstance(reply, Refusal) and reply.text.startswith(_ELSEWHERE):
                replies[place] = self._follow(client, commands[place], buffers[place])
        if lost:
            self._learn_anew(client, lost[0])
        return replies

    def close(self) -> None:
        for each in self._nodes.values():
            each.bulk.close()
        if self._client is not None:
            guarded(self._client.close)

    def _divided(self, client: Any, commands: Sequence[Sequence[Part]]) -> dict[Node, list[int]]:
        """Places of the commands by the node that has their key, of nodes that are asked now."""
        divided: defaultdict[Node, list[int]] = defaultdict(list)
        for place, command in enumerate(commands):
            try:
                found = client.get_node_from_key(command[1])
            except SlotNotCoveredError:
                continue
            divided[Node(found.host, int(found.port))].append(place)
        return {node: places for node, places in divided.items() if self._is_asked(node)}

    def _is_asked(self, node: Node) -> bool:
        """Whether the node does not rest. Of one whose rest is over, one thread finds out how it is."""
        with self._lock:
            each = self._nodes.get(node)
            if each is None or each.until is None:
                return True
            if self._clock() < each.until:
                return False
            self._rest(node, each)  # for all others, until its answer has come
            return True

    def _get_node_state(self, node: Node) -> _OfNode:
        with self._lock:
            if node not in self._nodes:
                self._nodes[node] = _OfNode(BulkConnections(node, self._address, self._secret, self._timeout))
            return self._nodes[node]

    def _send(self, node: Node, commands: Sequence[Sequence[Part]]) -> BulkConnection | None:
        """The connection that will answer; None where the node has failed, and rests."""
        bulk = self._get_node_state(node).bulk
        try:
            connection = bulk.borrow()
        except (OSError, ValueError):
            self._lose(node)
            return None
        try:
            connection.send(commands)
        except OSError:
            bulk.drop(connection)
            self._lose(node)
            return None
        return connection

    def _receive(self, node: Node, connection: BulkConnection, buffers: Sequence[Sequence[memoryview]]) -> list[Reply]:
        """A reply for each; none where the node has failed, and rests."""
        each = self._get_node_state(node)
        try:
            found: list[Reply] = list(connection.receive(0, buffers))
        except (OSError, ValueError, IndexError):
            each.bulk.drop(connection)
            self._lose(node)
            return []
        each.bulk.give_back(connection)
        with self._lock:
            each.rest, each.until = _FIRST_REST, None
        return found

    def _lose(self, node: Node) -> None:
        """The node has failed. Where it rests, another thread has found out before."""
        with self._lock:
            each = self._nodes[node]
            if each.until is None:
                self._rest(node, each)

    def _rest(self, node: Node, each: _OfNode) -> None:
        log.warning("remote_node_rests", host=node.host, port=node.port, seconds=each.rest)
        each.until = self._clock() + each.rest
        each.rest = min(2 * each.rest, _LONGEST_REST)

    def _learn_anew(self, client: Any, lost: Node) -> None:
        """Who has what, of the nodes that are left; where none responds, the next use begins with those of the address."""
        try:
            client.nodes_manager.initialize(last_failed_node_name=get_node_name(*lost))
        except UNANSWERED:
            with self._making:
                if self._client is client:
                    self._client = None
            client.close()

    def _follow(self, client: Any, command: Sequence[Part], buffers: Sequence[memoryview]) -> Reply:
        """The reply of the node that the command was sent on to."""
        words = [part if isinstance(part, bytes) else b"".join(part) for part in command]
        try:
            found = guarded(lambda: client.execute_command(words[0].decode(), *words[1:]))
        except ServerError as error:
            return Refusal(str(error))
        if isinstance(found, bool):  # as the library reads what SET and PEXPIRE return
            return (b"OK" if found else None) if words[0] == b"SET" else int(found)
        if not isinstance(found, bytes) or sum(map(len, buffers)) != len(found) or not buffers:
            return found if isinstance(found, bytes | int) else None
        at = 0
        for buffer in buffers:
            buffer[:] = found[at : at + len(buffer)]
            at += len(buffer)
        return Received()
