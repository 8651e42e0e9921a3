"""A stand-in of the process with a Mooncake client: it answers, is silent, is late, and dies, as it is asked."""

import json
import mmap
import os
import sys
from multiprocessing.connection import Connection


def main(staging: int, link: int) -> None:
    shared, connection, late = mmap.mmap(staging, 0), Connection(link), list[int]()
    while True:
        try:
            request = json.loads(connection.recv_bytes())
        except (EOFError, OSError):
            return
        if request["call"] == "die":
            os._exit(3)
        if request["call"] == "late":
            late.append(request["id"])
            continue
        for number in late if request["call"] == "now" else ():
            connection.send_bytes(json.dumps({"id": number, "answer": "late"}).encode())
        text = bytes(shared[request["at"] : request["at"] + 4]).decode() if "at" in request else str(os.getpid())
        connection.send_bytes(json.dumps({"id": request["id"], "answer": text}).encode())


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
