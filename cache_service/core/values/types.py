"""Identifiers, array types and enumerations of the core. The numbers of an IntEnum are the protocol's."""

from enum import IntEnum
from typing import NewType

import numpy as np
import numpy.typing as npt

SequenceId = NewType("SequenceId", int)  # chosen by a client, 1 to MAX_ID, unique within its session
BlockId = NewType("BlockId", int)  # index of a block in its pool; NULL_BLOCK is never allocated
SessionId = NewType("SessionId", str)  # 128 random bits in hex

NULL_BLOCK = BlockId(0)
UNKNOWN_TENANT = 1  # of a block that may still hold tokens of any tenant; tenants are negative, 0 is a block never used
NO_TENANT = 0  # in the place of a number: no tenant in particular
MAX_ID = 2**53 - 1

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]
NO_INT32: Int32Array = np.empty(0, np.int32)
NO_INT64: Int64Array = np.empty(0, np.int64)
NO_INT32.flags.writeable = NO_INT64.flags.writeable = False


class Executor(IntEnum):
    """The process that executes copies and transfer orders."""

    CACHE = 1
    ENGINE = 2


class SequenceState(IntEnum):
    """State of a sequence. The numbers are the protocol's; FREE_SLOT never leaves the core."""

    FREE_SLOT = 0
    WAITING = 1
    RUNNING = 2
    LOADING = 3
    SWAPPED = 4


class ReuseHint(IntEnum):
    """What a client knows of the next use of a sequence's blocks. The numbers are the protocol's."""

    UNSPECIFIED = 0
    NONE = 1
    SOON = 2


class StartResult(IntEnum):
    """Answer to one start. The numbers are the protocol's."""

    STARTED = 1
    LOADING = 2
    COMPUTING = 3
    NO_ROOM = 4


class ItemResult(IntEnum):
    """Answer to one fork, swap-out or swap-in. The numbers are the protocol's."""

    OK = 1
    NO_ROOM = 2


class TransferKind(IntEnum):
    """Direction of a transfer order. The numbers are the protocol's."""

    SWAP_OUT = 1  # device block to host block
    SWAP_IN = 2  # host block to device block


class PressureLevel(IntEnum):
    """How full a pool is, by blocks neither free nor evictable. The numbers are the protocol's."""

    LOW = 1
    MEDIUM = 2
    HIGH = 3
    CRITICAL = 4


class MatchEnd(IntEnum):
    """Why a match stops where it stops. The numbers are the protocol's."""

    COMPLETE = 1
    PARTIAL_BLOCK = 2
    NEVER_STORED = 3
    EVICTED = 4
    EXPIRED = 5
    CLEARED = 6
    COMPUTING = 7
    BELOW_MINIMUM = 8
    CACHING_OFF = 9
    ON_DISK = 10
    DISK_RESTS = 11
    NOT_WORTH_LOADING = 12
    BEHIND_A_HOLE = 13
    OTHER_TENANT = 14
    NOT_ASKED = 15
    NOT_LOADED = 16
    LOADING = 17


class EvictionNeed(IntEnum):
    """For whom a missed block was evicted, as seen by the tenant that misses it. The numbers are the protocol's."""

    NOT_EVICTED = 0
    NO_TENANT = 1
    OWN = 2
    OTHER = 3


class Tier(IntEnum):
    """Where a cached block's bytes are: of several tiers that have them, the nearest. The numbers are the protocol's."""

    DEVICE = 1
    HOST = 2
    DISK = 3
    REMOTE = 4


class EventKind(IntEnum):
    """The kinds of a watch's events. The numbers are the protocol's."""

    SNAPSHOT = 1
    SNAPSHOT_END = 2
    STORED = 3
    REMOVED = 4
    TIER_CHANGED = 5
    PRESSURE = 6
    POOL_REPLACED = 7


class BlockState(IntEnum):
    """Every block is in exactly one of these (rule R1)."""

    NULL = 1
    FREE = 2
    CACHED = 3  # indexed, in no table: evictable now
    REFERENCED = 4
    FENCED = 5  # in no table, but a step in flight may touch it
    IN_TRANSFER = 6  # in no table, an end of a transfer order in flight
    QUARANTINED = 7  # a session that ended may still write to it
