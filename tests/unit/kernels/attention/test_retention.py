"""Paged attention with sinks and windows against its references, with NaN in every block that retention gave back."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvkeeper.kernels import reference
from kvkeeper.kernels.attention.paged_attention_decode import paged_attention_decode, plan_decode
from kvkeeper.kernels.attention.paged_attention_prefill import paged_attention_prefill
from kvkeeper.kernels.attention.paged_rows import GatherPlan
from kvkeeper.kernels.cpu.attention import DirectDecode
from kvkeeper.kernels.errors import KernelArgumentError
from tests.support.slices import scaled
from tests.unit.kernels.worlds import World, edge_lengths, make_world, random_queries

pytestmark = pytest.mark.usefixtures("kernel_path")
SCALE = 0.3
KEPT = [(0, 1), (0, 4), (1, 1), (1, 4), (3, 2), (4, 3), (4, 4), (5, 8), (9, 1)]  # around the edges of blocks of 4


def punch(world: World, kept: list[tuple[int, int]], num_queries: list[int]) -> int:
    """Make holes of the blocks that neither sink nor any query's window needs, and poison them; how many there are."""
    size, num_holes = world.layout.block_size, 0
    for seq, ((sink, window), queries) in enumerate(zip(kept, num_queries, strict=True)):
        num_committed = int(world.seq_lens[seq]) - queries
        for idx in range(-(-sink // size), (num_committed - window) // size if window else 0):
            world.arena[world.block_tables[seq, idx]] = float("nan")
            world.block_tables[seq, idx] = 0
            num_holes += 1
    return num_holes


def columns(kept: list[tuple[int, int]]) -> tuple[torch.Tensor, torch.Tensor]:
    sinks, windows = zip(*kept, strict=True)
    return torch.tensor(sinks, dtype=torch.int32), torch.tensor(windows, dtype=torch.int32)


def both_queries(world: World, kept: list[tuple[int, int]], num_queries: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """q and q_sink, different except where both have the same position, so that a mix-up shows."""
    num_tokens = sum(num_queries)
    both = random_queries(2 * num_tokens, 4, world.layout.head_dim, world.layout.dtype)
    q, q_sink = both[:num_tokens], both[num_tokens:].clone()
    row = 0
    for seq_len, (sink, window), queries in zip(world.seq_lens.tolist(), kept, num_queries, strict=True):
        for position in range(seq_len - queries, seq_len):
            if window and position < sink + window:
                q_sink[row] = q[row]
            row += 1
    return q, q_sink


def check_decode(world: World, kept: list[tuple[int, int]], soft_cap: float | None = None) -> int:
    num_holes = punch(world, kept, [1] * len(kept))
    q, q_sink = both_queries(world, kept, [1] * len(kept))
    args = (q, world.layer, world.block_tables, world.seq_lens)
    options = {"scale": SCALE, "soft_cap": soft_cap, "retention": columns(kept), "q_sink": q_sink}
    found = paged_attention_decode(*args, **options)
    assert bool(found.isfinite().all())
    tolerance = {torch.float32: 2e-6, torch.float16: 4e-3, torch.bfloat16: 3e-2}[world.layout.dtype]
    torch.testing.assert_close(found, reference.paged_attention_decode(*args, **options), rtol=0, atol=tolerance)
    return num_holes


def check_prefill(world: World, kept: list[tuple[int, int]], num_queries: list[int], soft_cap: float | None = None) -> int:
    num_holes = punch(world, kept, num_queries)
    locs = torch.tensor([0, *num_queries], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    q, q_sink = both_queries(world, kept, num_queries)
    args = (q, world.layer, world.block_tables, world.seq_lens, locs)
    options = {"scale": SCALE, "soft_cap": soft_cap, "retention": columns(kept), "q_sink": q_sink}
    found = paged_attention_prefill(*args, **options)
    assert bool(found.isfinite().all())
    tolerance = {torch.float32: 2e-6, torch.float16: 4e-3, torch.bfloat16: 3e-2}[world.layout.dtype]
    torch.testing.assert_close(found, reference.paged_attention_prefill(*args, **options), rtol=0, atol=tolerance)
    return num_holes


@pytest.mark.parametrize(("sink", "window"), KEPT)
def test_decode_reads_sinks_and_window_and_no_hole(sink: int, window: int) -> None:
    lengths = sorted({1, sink + window, sink + window + 1, *edge_lengths(4, 7)})
    assert check_decode(make_world(lengths), [(sink, window)] * len(lengths))


@pytest.mark.parametrize("num_queries", [2, 5, 9])
@pytest.mark.parametrize(("sink", "window"), KEPT)
def test_each_query_of_a_chunk_has_its_own_window(sink: int, window: int, num_queries: int) -> None:
    lengths = [n for n in sorted({sink + window, sink + window + 1, *edge_lengths(4, 7)}) if n >= num_queries]
    assert check_prefill(make_world(lengths), [(sink, window)] * len(lengths), [num_queries] * len(lengths))


def test_a_whole_prompt_longer_than_sink_and_window() -> None:
    lengths = edge_lengths(4, 6)
    check_prefill(make_world(lengths), [(3, 5)] * len(lengths), lengths)


@pytest.mark.parametrize(("sink", "window"), [(9, 3), (2, 12)])
def test_prefill_in_calls_of_fewer_queries_than_sinks(monkeypatch: pytest.MonkeyPatch, sink: int, window: int) -> None:
    monkeypatch.setattr("kvkeeper.kernels.attention.gathered._MOST_QUERIES", 4)
    lengths = edge_lengths(4, 6)
    check_prefill(make_world(lengths), [(sink, window)] * len(lengths), lengths)
    check_prefill(make_world(lengths), [(sink, window)] * len(lengths), [-(-n // 2) for n in lengths])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("block_size", [1, 2, 16])
def test_dtypes_and_block_sizes(dtype: torch.dtype, block_size: int) -> None:
    lengths = edge_lengths(block_size, 4)
    kept = [(block_size // 2 + 1, block_size)] * len(lengths)
    check_decode(make_world(lengths, block_size=block_size, dtype=dtype), kept)
    check_prefill(make_world(lengths, block_size=block_size, dtype=dtype), kept, [-(-n // 3) for n in lengths])


def test_capped_scores() -> None:
    lengths = edge_lengths(4, 5)
    check_decode(make_world(lengths), [(3, 4)] * len(lengths), soft_cap=0.5)
    check_prefill(make_world(lengths), [(3, 4)] * len(lengths), [2] * len(lengths), soft_cap=0.5)


def test_each_sequence_is_computed_from_only_the_keys_that_it_sees(kernel_path: str) -> None:
    """One that sees all its keys costs nothing more than without the others."""
    kept = [(0, 0), (2, 5), (0, 3), (4, 8)]
    world = make_world([30, 40, 38, 12])
    args = (world.block_tables, world.seq_lens, world.layer)
    plan = plan_decode(*args, torch.float32, None, retention=columns(kept)).read
    if kernel_path == "compiled":
        assert isinstance(plan, DirectDecode)
        assert plan.num_keys == 30 + 7 + 3 + 12
        assert plan.sinks.tolist() == [0, 2, 0, 0]
    else:
        assert isinstance(plan, GatherPlan)
        assert [len(each.positions) for each in plan.sequences] == [30, 7, 3, 12]
        assert [each.sinks is not None for each in plan.sequences] == [False, True, False, False]
    check_decode(world, kept)


@settings(max_examples=scaled(40), deadline=None)
@given(st.data())
def test_mixed_batches_in_any_blocks(data: st.DataObject) -> None:
    lengths = data.draw(st.lists(st.integers(1, 24), min_size=1, max_size=4), label="lengths")
    queries = [data.draw(st.integers(0, n), label="queries") for n in lengths]
    kept = [(data.draw(st.integers(0, 9)), data.draw(st.integers(0, 9))) for _ in lengths]
    size, seed = data.draw(st.integers(1, 5), label="block size"), data.draw(st.integers(0, 9))
    check_decode(make_world(lengths, block_size=size, seed=seed), kept)
    check_prefill(make_world(lengths, block_size=size, seed=seed), kept, queries)


def test_chunks_give_what_one_prefill_and_decodes_give() -> None:
    world, kept = make_world([23]), columns([(3, 6)])
    q, q_sink = both_queries(world, [(3, 6)], [23])

    def attend(first: int, last: int) -> torch.Tensor:
        lens, locs = torch.tensor([last], dtype=torch.int32), torch.tensor([0, last - first], dtype=torch.int32)
        queries = {"scale": SCALE, "retention": kept, "q_sink": q_sink[first:last]}
        if last - first == 1:
            return paged_attention_decode(q[first:last], world.layer, world.block_tables, lens, **queries)
        return paged_attention_prefill(q[first:last], world.layer, world.block_tables, lens, locs, **queries)

    whole = attend(0, 23)
    for size in (1, 3, 4, 5):
        parts = torch.cat([attend(at, min(at + size, 23)) for at in range(0, 23, size)])
        torch.testing.assert_close(parts, whole, rtol=0, atol=2e-6)


def test_one_key_more_or_less_shows() -> None:
    world = make_world([17])
    q, q_sink = both_queries(world, [(3, 5)], [1])

    def attend(sink: int, window: int) -> torch.Tensor:
        args = (q, world.layer, world.block_tables, world.seq_lens)
        return paged_attention_decode(*args, scale=SCALE, retention=columns([(sink, window)]), q_sink=q_sink)

    right = attend(3, 5)
    for sink, window in ((2, 5), (4, 5), (3, 4), (3, 6)):
        assert float((attend(sink, window) - right).abs().max()) > 1e-3


def test_refusals_name_the_argument() -> None:
    world = make_world([9, 4])
    q, q_sink = both_queries(world, [(1, 2), (0, 0)], [1, 1])
    args, kept = (q, world.layer, world.block_tables, world.seq_lens), columns([(1, 2), (0, 0)])
    wrong = [
        ("come together", {"retention": kept}),
        ("come together", {"q_sink": q_sink}),
        ("like q", {"retention": kept, "q_sink": q_sink[:1]}),
        ("like q", {"retention": kept, "q_sink": q_sink.half()}),
        ("window of the model", {"retention": kept, "q_sink": q_sink, "window": 3}),
        ("2 lengths", {"retention": columns([(1, 2)]), "q_sink": q_sink}),
        ("2 lengths", {"retention": columns([(1, 2), (-1, 2)]), "q_sink": q_sink}),
        ("int32", {"retention": (kept[0].float(), kept[1]), "q_sink": q_sink}),
    ]
    for problem, options in wrong:
        with pytest.raises(KernelArgumentError, match=problem):
            paged_attention_decode(*args, scale=SCALE, **options)
        with pytest.raises(KernelArgumentError, match=problem):
            paged_attention_prefill(*args, torch.tensor([0, 1, 2], dtype=torch.int32), scale=SCALE, **options)
