"""Frames between the engine and its worker processes, over two pipes: a head of fixed size, then bytes.

Nothing is pickled. A job's head is its kind and the length of its body; an answer's head is its outcome, whether the worker
ends after it, and the length. Bodies: text is UTF-8, token ids are little-endian int32, everything else is JSON. A refusal is
the JSON of a list of two: its text, and what goes into the metadata of the error, strings by name.
"""

import struct
from enum import IntEnum
from typing import Final

JOB_HEAD: Final = struct.Struct("<BI")
ANSWER_HEAD: Final = struct.Struct("<B?I")
TOKEN_DTYPE: Final = "<i4"


class Kind(IntEnum):
    """The kind of a job: in brackets its body, after the colon its answer."""

    SET_UP = 0  # [JSON, see text_worker.SetUp], the first: nothing
    ENCODE = 1  # [text]: token ids
    ENCODE_CHAT = 2  # [JSON list of messages]: token ids
    DECODE = 3  # [token ids]: text
    CONSTRAINT = 4  # [JSON list of three: kind, source, most bytes of its pattern]: text of the grammar


class Outcome(IntEnum):
    """The outcome of a job, with the body of its answer."""

    DONE = 0  # the kind's answer
    REFUSED = 1  # refusal: why it cannot be done
    TOO_MUCH = 2  # refusal: which limit it passed
    BROKEN = 3  # its traceback: a bug
