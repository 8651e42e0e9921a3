"""TokenColumns: new tokens of many requests, by column, as an engine sends them to a front. Pure."""

import struct
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

_NUM_REQUESTS: Final = struct.Struct("<Q")
_COUNT = np.uint32  # as bytes, in the byte order of the machine that both ends are on


class TokenColumns(NamedTuple):
    """Tokens of R requests: the numbers that their reader knows them by, how many each has, and all, one behind the other."""

    numbers: npt.NDArray[np.uint64]  # [R]
    counts: npt.NDArray[np.integer]  # [R]
    token_ids: npt.NDArray[np.integer]  # [sum of counts]

    def to_bytes(self) -> bytes:
        counts, token_ids = self.counts.astype(_COUNT).tobytes(), self.token_ids.astype(_COUNT).tobytes()
        return b"".join((_NUM_REQUESTS.pack(len(self.numbers)), self.numbers.tobytes(), counts, token_ids))

    @classmethod
    def from_bytes(cls, body: bytes) -> "TokenColumns":
        """What to_bytes gave. Raises ValueError where the columns do not fit together."""
        (num_requests,) = _NUM_REQUESTS.unpack_from(body)
        numbers = np.frombuffer(body, np.uint64, num_requests, _NUM_REQUESTS.size)
        rest = np.frombuffer(body, _COUNT, offset=_NUM_REQUESTS.size + numbers.nbytes)
        columns = cls(numbers, rest[:num_requests], rest[num_requests:])
        if columns.counts.sum() != len(columns.token_ids) or len(columns.counts) != num_requests:
            raise ValueError("columns of different lengths")
        return columns


NO_TOKEN_COLUMNS = TokenColumns(np.empty(0, np.uint64), np.empty(0, np.int64), np.empty(0, np.int32))
