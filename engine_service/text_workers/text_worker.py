"""A worker process: turns text into tokens and back and tries constraints out, beside the engine and within limits.

Tokenising holds the interpreter for as long as it takes, and a pattern of twenty characters can need gigabytes: neither must
happen where streams are served. The kernel enforces the limits, so that they hold whatever a library does: a job that uses more
processor time ends this process, and so may a job that needs more memory. The process ends with its engine, whose pipe it
reads. Loads no torch and no grpc.
"""

import json
import os
import resource
import signal
import struct
import sys
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass
from enum import IntEnum
from functools import cached_property, partial
from pathlib import Path
from typing import Any, BinaryIO, Final

import numpy as np

from ..model.checkpoint.errors import TokenizerError
from ..outputs.constraint import BadGrammar, GrammarTooComplex, Vocabulary, behind_thought, try_out, write_grammar
from ..outputs.conversation import Chat, WrongChat
from ..outputs.tokenizer import Tokenizer

# Frames over two pipes: a head of fixed size, then bytes. Nothing is pickled. A job's head is its kind and the length of its
# body; an answer's head is its outcome, whether the worker ends after it, and the length. Bodies: text is UTF-8, token ids are
# little-endian int32, everything else is JSON. A refusal is the JSON of a list of two: its text, and strings by name for the
# metadata of the error.
JOB_HEAD: Final = struct.Struct("<BI")
ANSWER_HEAD: Final = struct.Struct("<B?I")
TOKEN_DTYPE: Final = "<i4"
_STACK_BYTES = 1 << 20  # less than a thread of the engine has: too deep a recursion ends this process first


class Kind(IntEnum):
    """The kind of a job: in brackets its body, after the colon its answer."""

    SET_UP = 0  # [JSON, see SetUp], the first: nothing
    ENCODE = 1  # [text]: token ids
    ENCODE_CHAT = 2  # [JSON, see Chat]: token ids
    DECODE = 3  # [token ids]: text
    CONSTRAINT = 4  # [JSON list of three: kind, source, most bytes of its pattern]: text of the grammar
    ENCODE_PLAIN_CHAT = 5  # the same as ENCODE_CHAT, of a chat with plain_user_text


class Outcome(IntEnum):
    """The outcome of a job, with the body of its answer."""

    DONE = 0  # the kind's answer
    REFUSED = 1  # refusal: why it cannot be done
    TOO_MUCH = 2  # refusal: which limit it passed
    BROKEN = 3  # its traceback: a bug


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of one job: seconds of processor time, and bytes beyond what the worker uses once it is set up."""

    cpu_s: float
    memory: int


@dataclass(frozen=True, slots=True)
class SetUp:
    """What a worker needs before its first job."""

    tokenizer: dict[str, Any]  # Tokenizer.state
    vocab_size: int
    limits: dict[str, Any]  # of Limits

    def to_bytes(self) -> bytes:
        return json.dumps(asdict(self)).encode()


class Worker:
    """Does jobs, one after another, in its own process."""

    def __init__(self, set_up: SetUp) -> None:
        self.limits = Limits(**set_up.limits)
        self._tokenizer = Tokenizer.from_state(set_up.tokenizer)
        self._vocab_size = set_up.vocab_size

    @cached_property
    def _vocabulary(self) -> Vocabulary:
        return Vocabulary.of(self._tokenizer, self._vocab_size)

    def prepare(self, kind: Kind) -> None:
        """Build what the first job of a kind needs. Without limits: it depends on the model alone."""
        if kind is Kind.CONSTRAINT:
            _ = self._vocabulary
        elif kind in (Kind.ENCODE_CHAT, Kind.ENCODE_PLAIN_CHAT):
            from ..outputs import chat_template  # noqa: F401  # the library alone: the model's template is within limits

            _ = self._tokenizer.plain_text if kind is Kind.ENCODE_PLAIN_CHAT else None

    def do(self, kind: Kind, body: bytes) -> tuple[Outcome, bytes]:
        """One job."""
        try:
            return Outcome.DONE, self._do(kind, body)
        except WrongChat as error:
            return Outcome.REFUSED, _refusal(error, field=error.field)
        except TokenizerError as error:
            return Outcome.REFUSED, _refusal(error)
        except BadGrammar as error:
            return Outcome.REFUSED, _refusal(error, **({} if error.limit is None else {"limit": str(error.limit)}))
        except GrammarTooComplex as error:
            return Outcome.TOO_MUCH, _refusal(error, exceeded=error.exceeded)
        except MemoryError:
            return Outcome.TOO_MUCH, _refusal("takes too much memory", exceeded="memory")
        except RecursionError:
            return Outcome.TOO_MUCH, _refusal("is nested too deep", exceeded="depth")
        except Exception:
            return Outcome.BROKEN, traceback.format_exc().encode()

    def _do(self, kind: Kind, body: bytes) -> bytes:
        if kind is Kind.ENCODE:
            return _ids_as_bytes(self._tokenizer.encode(body.decode()))
        if kind in (Kind.ENCODE_CHAT, Kind.ENCODE_PLAIN_CHAT):
            return _ids_as_bytes(self._tokenizer.encode_chat(Chat(**json.loads(body))))
        if kind is Kind.DECODE:
            return self._tokenizer.decode(np.frombuffer(body, TOKEN_DTYPE).tolist(), skip_special_tokens=False).encode()
        assert kind is Kind.CONSTRAINT
        kind_of_constraint, source, max_bytes, *thought = json.loads(body)
        grammar = write_grammar(kind_of_constraint, source, max_bytes)
        if thought:
            grammar = behind_thought(grammar, self._tokenizer, *thought)
        try_out(self._vocabulary, grammar)
        return grammar.encode()


def _refusal(text: object, **metadata: str) -> bytes:
    return json.dumps([str(text), metadata]).encode()


def _ids_as_bytes(token_ids: list[int]) -> bytes:
    return np.array(token_ids, TOKEN_DTYPE).tobytes()


def main() -> None:
    """Do jobs until the engine closes the pipe, or a job has taken too much."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # from a terminal: the engine still has requests to end
    jobs, pipe = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a library prints must not be read as an answer
    _set_limit(resource.RLIMIT_CORE, 0)
    _set_limit(resource.RLIMIT_STACK, _STACK_BYTES)
    first = _read(jobs)
    if first is None:
        return
    worker = Worker(SetUp(**json.loads(first[1])))
    _answer(pipe, Outcome.DONE, b"", is_last=False)
    prepared = set[Kind]()
    most = 0
    while (job := _read(jobs)) is not None:
        kind, body = job
        if kind not in prepared:
            prepared.add(kind)
            _set_limit(resource.RLIMIT_AS, resource.RLIM_INFINITY)
            worker.prepare(kind)
            most = _memory() + worker.limits.memory
            _set_limit(resource.RLIMIT_AS, most)
        outcome, found = _within(worker.limits.cpu_s, partial(worker.do, kind, body))
        # Memory that a library keeps after a large job must not shrink what the next jobs may use.
        is_last = outcome is Outcome.BROKEN or _memory() > most - worker.limits.memory // 2
        _answer(pipe, outcome, found, is_last=is_last)
        if is_last:
            return


def _within(cpu_s: float, do: Callable[[], tuple[Outcome, bytes]]) -> tuple[Outcome, bytes]:
    """The job's outcome. SIGPROF ends this process if the job takes more processor time."""
    signal.setitimer(signal.ITIMER_PROF, cpu_s)
    try:
        return do()
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def _read(jobs: BinaryIO) -> tuple[Kind, bytes] | None:
    head = jobs.read(JOB_HEAD.size)
    if len(head) < JOB_HEAD.size:
        return None
    kind, length = JOB_HEAD.unpack(head)
    body = jobs.read(length)
    return (Kind(kind), body) if len(body) == length else None


def _answer(pipe: BinaryIO, outcome: Outcome, body: bytes, *, is_last: bool) -> None:
    pipe.write(ANSWER_HEAD.pack(outcome, is_last, len(body)) + body)
    pipe.flush()


def _memory() -> int:
    """Bytes of address space."""
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


def _set_limit(which: int, most: int) -> None:
    """Set the soft limit, as far as the hard limit allows."""
    _, hard = resource.getrlimit(which)
    if most == resource.RLIM_INFINITY or (hard != resource.RLIM_INFINITY and most > hard):
        most = hard
    resource.setrlimit(which, (most, hard))


if __name__ == "__main__":
    try:
        main()
    except BrokenPipeError:
        sys.exit(0)  # the engine is gone
