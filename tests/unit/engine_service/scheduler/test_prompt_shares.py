"""The time for prompts: a client pays for its own by waiting while another client decodes, and no longer than they cost."""

from collections import Counter

from kvkeeper.engine_service.scheduler.client_shares import PromptRoom, PromptShares

DECODE_S = 2.0**-7  # exact, so that debts are paid to the last bit


def steps_between(shares: PromptShares, prompt_s: float, num_steps: int) -> list[int]:
    """The steps that computed a prompt of "b", which always has one, while "a" decodes."""
    at = []
    for step in range(num_steps):
        if PromptRoom(shares, DECODE_S, {"a", "b"}).take("b", 8):
            at.append(step)
            shares.note(DECODE_S + prompt_s, DECODE_S, Counter(b=1), 8)
        else:
            shares.note(DECODE_S, DECODE_S, Counter(), 0)
    return at


def test_prompts_take_as_much_time_as_the_decodes_and_are_never_shut_out() -> None:
    assert steps_between(PromptShares(), 4 * DECODE_S, 20) == [0, 4, 8, 12, 16]
    assert steps_between(PromptShares(), DECODE_S, 5) == [0, 1, 2, 3, 4]
    assert steps_between(PromptShares(), 1e9, 1000) == [0, 256, 512, 768], "a debt lasts so many steps at most"


def test_cheap_prompts_come_as_many_at_a_time_as_one_step_pays() -> None:
    shares = PromptShares()
    shares.note(DECODE_S + DECODE_S / 8, DECODE_S, Counter(b=1), 8)
    room = PromptRoom(shares, DECODE_S, {"a"})
    assert [room.take("b", 8) for _ in range(12)] == [8] * 8 + [0] * 4
    assert room.take("c", 8), "each client has its own room"


def test_nothing_is_held_back_where_no_other_client_decodes() -> None:
    shares = PromptShares()
    shares.note(DECODE_S + 1.0, DECODE_S, Counter(b=1), 8)
    assert not PromptRoom(shares, DECODE_S, {"a", "b"}).take("b", 8)
    for decoding in (set[str](), {"b"}):
        room = PromptRoom(shares, DECODE_S, decoding)
        assert all(room.take("b", 8) == 8 for _ in range(100))


def test_a_client_pays_for_its_own_prompts_alone() -> None:
    shares = PromptShares()
    shares.note(5 * DECODE_S, DECODE_S, Counter(b=3, c=1), 32)
    room = PromptRoom(shares, DECODE_S, {"a"})
    assert not room.take("b", 8)
    assert room.take("c", 8), "it owed one step, which this one paid"
    assert room.take("d", 8)


def test_a_long_prompt_comes_in_pieces_that_one_step_pays() -> None:
    shares = PromptShares()
    assert PromptRoom(shares, DECODE_S, {"a"}).take("b", 512) == 64, "a few where the cost is not known"
    shares.note(2 * DECODE_S, DECODE_S, Counter(b=1), 200)
    room = PromptRoom(shares, DECODE_S, {"a"})
    assert (room.take("b", 150), room.take("b", 150)) == (150, 0), "one prompt"
    assert room.take("c", 512) == 200


def test_a_piece_is_short_where_its_tokens_cost_much() -> None:
    for num_paid, piece in ((100, 100), (40, 64), (20, 40), (6, 12), (1, 8)):
        shares = PromptShares()
        shares.note(11 * DECODE_S, DECODE_S, Counter(d=1), 10 * num_paid)
        assert PromptRoom(shares, DECODE_S, {"a"}).take("b", 512) == piece
