"""What a client that comes back is sent of a submission: what it does not have, and nothing twice."""

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvkeeper.engine_service.rpc.stream_pace import StreamPace
from kvkeeper.engine_service.rpc.submission import Received, Submission, SubmissionReader
from kvkeeper.engine_service.values.errors import InvalidField, RequestFailed
from kvkeeper.engine_service.values.output_chunk import OutputChunk, TokenLogprobs, Usage
from kvkeeper.engine_service.values.request import FinishReason

AT_ONCE = StreamPace(0)
TEXTS = ["", "a", "bc", "é"]  # of token i, by i % 4: text runs behind tokens
USAGE = Usage(1, 0, 2, 0, 0)


def chunks_of(index: int, num_tokens: int, end: str) -> list[OutputChunk]:
    """A continuation: a token a chunk; it ends with a text of its own, with its last token, or not at all."""
    prompt = (TokenLogprobs(9, -1.0, 1, (), ()),) if index == 0 else ()
    made = [
        OutputChunk(
            index,
            TEXTS[token % 4],
            (token,),
            FinishReason.LENGTH if end == "with its last token" and token == num_tokens - 1 else None,
            logprobs=(TokenLogprobs(token, -0.5, 1, (), ()),),
            prompt_logprobs=prompt if token == 0 else (),
        )
        for token in range(num_tokens)
    ]
    if end == "behind it":
        made.append(OutputChunk(index, "tail", (), FinishReason.STOP, prompt_logprobs=() if num_tokens else prompt))
    return made


async def submission_of(chunks: list[OutputChunk]) -> Submission:
    submission = Submission(b"", asyncio.get_running_loop().create_future())
    for chunk in chunks:
        submission.add_output(chunk)
    return submission


continuations = st.tuples(st.integers(1, 9), st.sampled_from(["with its last token", "behind it"]))


@settings(deadline=None)
@given(made=st.lists(continuations, min_size=1, max_size=3), data=st.data())
def test_what_follows_is_sent_once_wherever_the_stream_broke(made: list[tuple[int, str]], data: st.DataObject) -> None:
    """The client has some chunks of each continuation, the request has more, and it ends while the client reads."""
    whole = [chunks_of(index, num_tokens, end) for index, (num_tokens, end) in enumerate(made)]
    cuts = [data.draw(st.integers(0, len(chunks))) for chunks in whole]
    there = [data.draw(st.integers(cut, len(chunks))) for cut, chunks in zip(cuts, whole, strict=True)]
    had = [chunk for chunks, cut in zip(whole, cuts, strict=True) for chunk in chunks[:cut]]
    later = [chunk for chunks, num in zip(whole, there, strict=True) for chunk in chunks[num:]]

    async def read() -> list[OutputChunk]:
        submission = await submission_of([chunk for chunks, num in zip(whole, there, strict=True) for chunk in chunks[:num]])
        received = [
            Received(index, sum(len(chunk.token_ids) for chunk in chunks[:cut]), cut == len(chunks))
            for index, (chunks, cut) in enumerate(zip(whole, cuts, strict=True))
            if cut
        ]
        found: list[OutputChunk] = []
        with SubmissionReader(submission, received, AT_ONCE) as reader:
            found += (await reader.take_unread())[0]
            for chunk in later:
                submission.add_output(chunk)
                found += (await reader.take_unread())[0]
            submission.add_output(OutputChunk(0, "", (), whole[0][-1].finish_reason, usage=USAGE))
            found += (await reader.take_unread())[0]
        assert not submission.readers
        return found

    found = asyncio.run(read())
    assert [chunk.usage for chunk in found if chunk.usage] == [found[-1].usage] == [USAGE]
    for index, chunks in enumerate(whole):
        own = [chunk for chunk in had + found if chunk.index == index]
        assert [token for chunk in own for token in chunk.token_ids] == [token for chunk in chunks for token in chunk.token_ids]
        assert "".join(chunk.text for chunk in own) == "".join(chunk.text for chunk in chunks)
        assert [one.token_id for chunk in own for one in chunk.logprobs] == list(range(made[index][0]))
        assert len([one for chunk in own for one in chunk.prompt_logprobs]) == (index == 0)


async def test_a_place_that_no_message_led_to_is_refused() -> None:
    whole = [OutputChunk(0, "abc", (1, 2, 3)), OutputChunk(1, "", (5,), FinishReason.LENGTH)]
    submission = await submission_of(whole)
    for received in (
        Received(0, 2, has_ended=False),
        Received(0, 4, has_ended=False),
        Received(0, 3, has_ended=True),
        Received(1, 0, has_ended=True),
        Received(2, 1, has_ended=False),
        Received(2, 0, has_ended=True),
    ):
        with pytest.raises(InvalidField):
            SubmissionReader(submission, [received], AT_ONCE)
    ok = [Received(0, 3, has_ended=False), Received(1, 1, has_ended=True), Received(2, 0, has_ended=False)]
    with SubmissionReader(submission, ok, AT_ONCE) as reader:
        assert await reader.take_unread() == ([], None)


async def test_an_error_comes_behind_what_was_given_before_it() -> None:
    failure = RequestFailed("no more")
    submission = await submission_of([OutputChunk(0, "a", (1,))])
    submission.add_output(failure)
    with SubmissionReader(submission, [], AT_ONCE) as reader:
        assert await reader.take_unread() == ([OutputChunk(0, "a", (1,))], failure)
