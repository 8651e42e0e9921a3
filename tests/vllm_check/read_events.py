"""What `kvkeeper events` published, read with vLLM's own structures: `python read_events.py ADDRESS NUMBER`, where vLLM is.

ADDRESS is that of the replay. Asks until NUMBER blocks are cached. Prints how many are, how many were told in all, and how many
of these have another hash than vLLM's own function gives them.
"""

import json
import sys
import time

import msgspec
import zmq
from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KVEventBatch, ZmqEventPublisher
from vllm.utils.hashing import sha256_cbor
from vllm.v1.core import kv_cache_utils

PATIENCE_S = 60


def main(address: str, wanted: str) -> None:
    kv_cache_utils.init_none_hash(sha256_cbor)
    until = time.monotonic() + PATIENCE_S
    while (found := read(address))["num_cached"] != int(wanted) and time.monotonic() < until:
        time.sleep(0.1)
    print(json.dumps(found))


def read(address: str) -> dict[str, int]:
    """A replay from the beginning."""
    cached: set[int] = set()
    whole: dict[int, bytes] = {}  # all 32 bytes of the hashes, by what events carry of them
    num_wrong = num_told = 0
    for batch in replayed(address):
        for event in batch.events:
            if isinstance(event, BlockStored):
                parent = None if event.parent_block_hash is None else whole[event.parent_block_hash]
                for at, told in enumerate(event.block_hashes):
                    tokens = event.token_ids[at * event.block_size : (at + 1) * event.block_size]
                    parent = kv_cache_utils.hash_block_tokens(sha256_cbor, parent, tokens)
                    num_wrong += kv_cache_utils.maybe_convert_block_hash(parent) != told
                    num_told += 1
                    whole[told] = parent
                cached |= {*event.block_hashes}
            elif isinstance(event, BlockRemoved):
                cached -= {*event.block_hashes}
            else:
                assert isinstance(event, AllBlocksCleared)
                cached.clear()
    return {"num_cached": len(cached), "num_told": num_told, "num_wrong": num_wrong}


def replayed(address: str) -> list[KVEventBatch]:
    decoder, batches, last = msgspec.msgpack.Decoder(type=KVEventBatch), [], -1
    with zmq.Context() as context, context.socket(zmq.DEALER) as replay:
        replay.rcvtimeo, replay.linger = 1000 * PATIENCE_S, 0
        replay.connect(address)
        replay.send_multipart([b"", (0).to_bytes(8, "big")])
        while True:
            _, _, number, payload = replay.recv_multipart()
            if number == ZmqEventPublisher.END_SEQ:
                return batches
            assert int.from_bytes(number, "big") > last
            last = int.from_bytes(number, "big")
            batches.append(decoder.decode(payload))


if __name__ == "__main__":
    main(*sys.argv[1:])
