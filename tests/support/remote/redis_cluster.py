"""RedisCluster: three redis-servers on this machine that make one cluster, each with a third of the slots and no replica."""

from pathlib import Path

from redis.crc import key_slot

from tests.support.remote.redis_server import RedisServer, free_port

NUM_NODES, NUM_SLOTS = 3, 16_384
SIZE = b"cluster_size:%d" % NUM_NODES
_FLAGS = ["--cluster-enabled", "yes", "--cluster-require-full-coverage", "no", "--cluster-node-timeout", "60000"]


class RedisCluster:
    """Running until `close`. A node that is gone keeps its slots."""

    def __init__(self, folder: Path) -> None:
        self.nodes: list[RedisServer] = []
        for number in range(NUM_NODES):
            own = folder / f"node-{number}"
            own.mkdir()
            bus = free_port()
            node = RedisServer(own, *_FLAGS, "--cluster-port", str(bus))
            self.nodes.append(node)
            first, last = (NUM_SLOTS * at // NUM_NODES for at in (number, number + 1))
            client = node.client()
            client.execute_command("CLUSTER", "ADDSLOTSRANGE", first, last - 1)
            client.execute_command("CLUSTER", "SET-CONFIG-EPOCH", number + 1)
            if number == 0:
                first_bus = bus
            else:
                client.execute_command("CLUSTER", "MEET", "127.0.0.1", self.nodes[0].port, first_bus)
        self.wait()

    def wait(self) -> None:
        """Until each node sees all of them."""
        for node in self.nodes:
            client = node.client()
            while b"cluster_state:ok" not in (info := client.execute_command("CLUSTER", "INFO")) or SIZE not in info:
                client.wait(1, 50)  # the server answers after so many milliseconds, for there is no replica

    @property
    def address(self) -> str:
        listed = ",".join(f"127.0.0.1:{node.port}" for node in self.nodes)
        return f"redis://{listed}?cluster=true"

    def secret(self) -> Path:
        return self.nodes[0].secret()

    def move(self, key: bytes, to: int, state: str = "NODE") -> None:
        """Hands the slot of a key over to a node (NODE), or begins to (MIGRATING)."""
        slot, taker, giver = key_slot(key), self.nodes[to], self.nodes[self.place_of(key)]
        if state == "MIGRATING":
            taker.client().execute_command("CLUSTER", "SETSLOT", slot, "IMPORTING", self._id(giver))
        for node in (giver,) if state == "MIGRATING" else self.nodes:
            if node.is_running:
                node.client().execute_command("CLUSTER", "SETSLOT", slot, state, self._id(taker))

    def place_of(self, key: bytes) -> int:
        """Which node has the slot of a key, as the cluster was made."""
        slot = key_slot(key)
        return next(at for at in range(NUM_NODES) if slot < NUM_SLOTS * (at + 1) // NUM_NODES)

    def clear(self) -> None:
        for node in self.nodes:
            node.client().flushall()

    def blocks(self) -> list[list[bytes]]:
        """The keys of blocks that each node has."""
        return [node.blocks() for node in self.nodes]

    def close(self) -> None:
        for node in self.nodes:
            node.close()

    @staticmethod
    def _id(node: RedisServer) -> bytes:
        found: bytes = node.client().execute_command("CLUSTER", "MYID")
        return found
