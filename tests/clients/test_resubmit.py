"""What a client takes of an output that it asked for again, however the chunks are cut; and how long it asks."""

import grpc
from hypothesis import given, settings
from hypothesis import strategies as st

from kvkeeper.client import GenerateOptions, KvkeeperError, OutputChunk, Sampling
from kvkeeper.client.engine.resubmit import PAUSE_S, Received, repeatable
from kvkeeper.engine.v1 import engine_service_pb2 as pb

TEXTS = ["", "a", "bc", "é"]  # text of token i, by i % 4
GONE = KvkeeperError(grpc.StatusCode.UNAVAILABLE)
TAKEN = KvkeeperError(grpc.StatusCode.ALREADY_EXISTS, "DUPLICATE_REQUEST")


def chunks_of(num_tokens: int, cuts: list[int], *, index: int = 0, is_whole: bool = True) -> list[OutputChunk]:
    """An output of num_tokens tokens in chunks that end at the cuts; the last says so if it is whole."""
    ends = sorted({min(cut, num_tokens) for cut in cuts} | {num_tokens})
    made, start = [], 0
    for end in ends:
        tokens = tuple(range(start, end))
        reason = "length" if is_whole and end == num_tokens else None
        made.append(OutputChunk(index, "".join(TEXTS[token % 4] for token in tokens), tokens, reason))
        start = end
    return made


cuts = st.lists(st.integers(1, 20), max_size=6)


@settings(deadline=None)
@given(attempts=st.lists(st.tuples(st.integers(0, 20), cuts), max_size=4), last=cuts)
def test_every_token_and_character_comes_once(attempts: list[tuple[int, list[int]]], last: list[int]) -> None:
    received = Received(10.0)
    taken: list[OutputChunk] = []
    for num_tokens, chunks in attempts:
        for index in (0, 1):
            made = chunks_of(num_tokens, chunks, index=index, is_whole=False)
            taken += [chunk for chunk in map(received.new_part, made) if chunk is not None]
        assert received.may_ask_again(GONE, 0.0)
    for index in (0, 1):
        taken += [chunk for chunk in map(received.new_part, chunks_of(20, last, index=index)) if chunk is not None]
    for index in (0, 1):
        own = [chunk for chunk in taken if chunk.index == index]
        assert [token for chunk in own for token in chunk.token_ids] == list(range(20))
        assert "".join(chunk.text for chunk in own) == "".join(TEXTS[token % 4] for token in range(20))
        assert [chunk.finish_reason for chunk in own if chunk.finish_reason] == ["length"]


@settings(deadline=None)
@given(breaks=st.lists(st.integers(0, 20), max_size=4), chunks=cuts)
def test_a_client_that_follows_is_sent_what_it_does_not_have(breaks: list[int], chunks: list[int]) -> None:
    received = Received(10.0, is_submitted=True)
    taken: list[OutputChunk] = []
    have = 0
    for end in [*sorted(breaks), 20]:
        told = {one.index: (one.num_tokens, one.has_ended) for one in received.outputs()}
        assert told == ({0: (have, have == 20)} if have else {})
        for chunk in chunks_of(20, [*chunks, end, have]):
            if chunk.token_ids and have <= chunk.token_ids[0] and chunk.token_ids[-1] < end:
                new = received.new_part(chunk)
                assert new == chunk, "a stream that goes on repeats nothing"
                taken.append(chunk)
        have = max(have, end)
        assert received.may_ask_again(GONE, 0.0)
    assert [token for chunk in taken for token in chunk.token_ids] == list(range(20))
    assert received.outputs() == [pb.ReceivedOutput(index=0, num_tokens=20, has_ended=True)]


def test_an_ended_continuation_says_nothing_more() -> None:
    received = Received(10.0)
    for chunk in chunks_of(3, []):
        assert received.new_part(chunk) is not None
    assert received.may_ask_again(GONE, 0.0)
    assert [received.new_part(chunk) for chunk in chunks_of(3, [1])] == [None, None]


def test_it_is_asked_again_for_so_long_and_only_where_that_helps() -> None:
    received = Received(1.0)
    assert not received.may_ask_again(TAKEN, 0.0), "the first time, the id really is taken"
    assert received.may_ask_again(GONE, 5.0)
    assert received.may_ask_again(TAKEN, 5.5)
    assert not received.may_ask_again(GONE, 6.0 - PAUSE_S / 2)
    received.new_part(OutputChunk(0, "x", (1,), None))
    assert received.may_ask_again(GONE, 60.0), "something came: the time starts anew"
    assert not received.may_ask_again(KvkeeperError(grpc.StatusCode.INTERNAL, "REQUEST_FAILED"), 60.0)
    assert not Received(0.0).may_ask_again(GONE, 0.0)


def test_an_id_and_a_seed_are_drawn_once() -> None:
    options = repeatable(GenerateOptions(resubmit_s=1.0))
    assert options.request_id
    assert options.sampling.seed is not None
    kept = GenerateOptions(resubmit_s=1.0, request_id="mine", sampling=Sampling(seed=5))
    assert repeatable(kept) == kept
    assert repeatable(GenerateOptions()) == GenerateOptions()
