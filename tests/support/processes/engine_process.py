"""A process that holds a session as an engine does: it steps, renews, and writes into its mapped arena without a pause.

`python -m tests.support.processes.engine_process ADDRESS TTL_MS` says that it is ready, then obeys words on stdin and
answers each with one JSON line: "work" opens, attaches, starts a sequence and a fork of it and says so, and then goes on
renewing and writing, into the block of the one and the copy that the other was given, until it is refused, when it tells
why, and writes on; "idle" opens a session with a long lease and leaves it alone; "replay" sends every call it ever sent
again, byte for byte, also with either of the present session's ids; "drain" stops writing, unmaps and closes.
"""

import json
import sys
import threading
from collections import Counter
from typing import Any

import grpc
import numpy as np

from kvkeeper.cache.v1 import cache_service_pb2 as pb
from kvkeeper.client.cache_sync import CacheClient
from kvkeeper.client.errors import KvkeeperError, to_error
from kvkeeper.client.session_sync import CacheSession
from kvkeeper.client.steps import StepItems, encode
from tests.support.worlds.cache_api import BLOCK_BYTES, BLOCK_SIZE, DEADLINE, SPEC

NUM_TOKENS = 2 * BLOCK_SIZE + 2  # two full blocks that are committed, and one that is written all the time
_PREFIX = "/kvkeeper.cache.v1.CacheService/"
Call = tuple[str, Any]  # method, request


class Writer:
    """A thread that counts upwards in blocks until it is stopped."""

    def __init__(self, blocks: Any) -> None:
        self._is_over = threading.Event()
        self._words = [block[:8].view(np.int64) for block in blocks]
        self._thread = threading.Thread(target=self._write, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._is_over.set()
        self._thread.join()
        del self._words

    def _write(self) -> None:
        count = 0
        while not self._is_over.is_set():
            count += 1
            for word in self._words:
                word[0] = count


class Engine:
    """A session of its own: it steps, renews and writes, and remembers every call that it sent."""

    def __init__(self, address: str, ttl_ms: int) -> None:
        self._client = CacheClient(address)
        self._channel = grpc.insecure_channel(address)
        self._ttl_ms = ttl_ms
        self._sent: list[Call] = []
        self._writer: Writer | None = None
        self._num_sequences = 0

    def idle(self) -> dict[str, object]:
        self._open(60_000)
        return {"session": self._session.session_id}

    def _open(self, ttl_ms: int) -> None:
        self._session: CacheSession = self._client.open_session(SPEC, pb.EXECUTOR_ENGINE, ttl_ms)
        self._arena = self._session.attach()

    def work(self) -> dict[str, object]:
        while True:
            self._open(self._ttl_ms)
            try:
                blocks = self._start()
                break
            except (KvkeeperError, grpc.RpcError):  # too slow for so short a lease
                self.drain()
        self._writer = self._write(blocks)
        tell({"session": self._session.session_id, "blocks": blocks})
        while True:
            try:
                self._session.renew()
            except KvkeeperError as error:
                return {"refused": error.reason}

    def _write(self, blocks: list[int]) -> Writer:
        """Leaves no view of the arena behind but the writer's."""
        arena = self._arena.array.reshape(-1, BLOCK_BYTES)
        return Writer([arena[block] for block in blocks])

    def _start(self) -> list[int]:
        """A sequence with its first tokens committed, and a fork of it; returns the block that each goes on writing."""
        self._num_sequences += 1
        first, number = 100_000 * self._num_sequences, 2 * self._num_sequences
        session = self._session
        tokens = list(range(first, first + NUM_TOKENS))
        ids = {"session_id": session.session_id, "epoch": session.epoch}
        self._call("CreateSequence", pb.CreateSequenceRequest(**ids, sequence_id=number, token_ids=tokens))
        starts = StepItems(start_ids=np.array([number]), start_max_new=np.array([NUM_TOKENS], np.int32),
                           start_max_hit=np.array([0], np.int32))  # fmt: skip
        answer = pb.StepResponse.FromString(self._step(starts, 0))
        table = np.frombuffer(answer.start_block_ids, "<i4").tolist()
        commits = StepItems(commit_ids=np.array([number]), commit_lens=np.array([NUM_TOKENS - 1], np.int32),
                            commit_num_new=np.array([0], np.int32), commit_tokens=np.array([], np.int32))  # fmt: skip
        self._step(commits, 1)
        forks = StepItems(fork_parents=np.array([number]), fork_children=np.array([number + 1]),
                          fork_lens=np.array([NUM_TOKENS - 1], np.int32), reserve_ids=np.array([number + 1]),
                          reserve_min=np.array([NUM_TOKENS], np.int32),
                          reserve_max=np.array([NUM_TOKENS], np.int32))  # fmt: skip
        answer = pb.StepResponse.FromString(self._step(forks, 2))
        sources = np.frombuffer(answer.copy_source_block_ids, "<i4").tolist()
        assert sources == [table[2]], "the fork writes into a copy of the block that it shares"
        return [int(table[2]), *np.frombuffer(answer.copy_destination_block_ids, "<i4").tolist()]

    def replay(self) -> dict[str, object]:
        """Every call of the past, as it was and under the present ids: what each was answered."""
        present = {"session_id": self._session.session_id, "epoch": self._session.epoch}
        reasons: Counter[str] = Counter()
        for method, request in self._sent:
            requests = [request]
            if request.session_id != present["session_id"]:
                for name, value in present.items():
                    mixed = type(request)()
                    mixed.CopyFrom(request)
                    setattr(mixed, name, value)
                    requests.append(mixed)
            for each in requests:
                try:
                    self._raw(method, each.SerializeToString())
                    reasons["ACCEPTED"] += 1
                except grpc.RpcError as error:
                    reasons[to_error(error).reason] += 1
        return {"reasons": reasons}

    def drain(self) -> dict[str, object]:
        if self._writer is not None:
            self._writer.stop()
            self._writer = None
        self._arena.close()
        self._session.close(drained=True)
        return {"drained": True}

    def _step(self, items: StepItems, completed: int) -> bytes:
        session = self._session
        raw = encode(items, session.session_id, session.epoch, completed + 1, completed)
        return self._call("Step", pb.StepRequest.FromString(raw))

    def _call(self, method: str, request: Any) -> bytes:
        self._sent.append((method, request))
        ids = {"session_id": request.session_id, "epoch": request.epoch}
        self._sent.append(("RenewSession", pb.RenewSessionRequest(**ids)))
        return self._raw(method, request.SerializeToString())

    def _raw(self, method: str, raw: bytes) -> bytes:
        answer: bytes = self._channel.unary_unary(_PREFIX + method)(raw, timeout=DEADLINE)
        return answer


def tell(answer: dict[str, object]) -> None:
    print(json.dumps(answer), flush=True)


def main() -> None:
    engine = Engine(sys.argv[1], int(sys.argv[2]))
    tell({"ready": True})
    for line in sys.stdin:
        tell(getattr(engine, line.strip())())


if __name__ == "__main__":
    main()
