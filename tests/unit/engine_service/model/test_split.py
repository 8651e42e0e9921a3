"""Models that are split over ranks: logits against transformers, what a rank reads of a checkpoint, and what is refused."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch

from kvkeeper.engine_service.compute.model_runner import ModelRunner, make_kv_layout
from kvkeeper.engine_service.config import EngineConfig
from kvkeeper.engine_service.model import loader
from kvkeeper.engine_service.model.checkpoint.errors import UnsupportedModelError, WeightsError
from kvkeeper.engine_service.model.checkpoint.safetensors_files import StoredTensor
from kvkeeper.engine_service.model.config import read_model_config
from kvkeeper.engine_service.model.demo_model import DEMO_MODEL_DIR
from kvkeeper.engine_service.model.hash_toy import HashToyConfig, HashToyRunner, expected_next_token
from kvkeeper.engine_service.model.loader import load_model
from kvkeeper.engine_service.model.loading import filling
from kvkeeper.engine_service.model.split import WHOLE, Split, config_of_rank
from kvkeeper.engine_service.ranks.rank_model import load_rank_model
from kvkeeper.kernels.cpu import compiled
from kvkeeper.kernels.quantised.formats import FORMATS
from kvkeeper.kernels.quantised.layout import QuantisedLayout
from tests.support.models.tiny_models import (
    NumericsCase,
    build_model_folder,
    numerics_cases,
    random_tokens,
    reference_logits,
    tiny_model,
)
from tests.support.worlds.batches import ScheduledRow, build_batch
from tests.support.worlds.hand_tables import HandTables
from tests.support.worlds.rank_threads import on_ranks, over_gloo

torch.set_num_threads(1)

BLOCK_SIZE = 4
# Of each kind of projection, norm and window one; and some for four ranks on two KV heads.
TWO = ["llama_tied", "granite_biased", "qwen3_moe_renormalised_one_dense", "gemma2", "gpt_oss", "llama4_dense_between_biased"]
TWO += ["deepseek_v2", "deepseek_v3_biased_halves", "qwen3_5_27b", "qwen3_5_35b_a3b", "qwen3_next_biased_one_dense"]
TWO += ["kimi_linear", "ling_3", "lfm2_biased_untied", "lfm2_moe", "nemotron_3_nano", "nemotron_3_super", "nemotron_h_biased"]
VOCAB, HIDDEN, LAYERS = 512, 64, 2  # of tiny models
ODD = 515  # a vocabulary that neither 2 nor 4 divide
FOUR = ["llama_biased_linear_rope", "qwen3_tied", "mixtral", "phi3_window_partial", "deepseek_v3", "lfm2"]


def with_vocabulary(name, size):
    chosen = tiny_model(name)
    return replace(chosen, overrides=chosen.overrides | {"vocab_size": size})


def split_logits(folder, num_ranks, cases, chunk_size=7, **options):
    """What the first rank gives for the cases."""

    def compute(split):
        model, _ = load_model(folder, progress=False, split=split, **options)
        return HandTables(model, BLOCK_SIZE).compute(cases, chunk_size)

    first, *others = on_ranks(num_ranks, compute)
    assert all(logits.shape == (len(case.tokens), 0) for other in others for logits, case in zip(other, cases, strict=True))
    return first


@pytest.mark.parametrize(("name", "num_ranks"), [(name, 2) for name in TWO] + [(name, 4) for name in FOUR])
def test_logits_of_several_ranks_are_those_of_transformers(name, num_ranks, tmp_path):
    folder = build_model_folder(tmp_path, tiny_model(name), max_shard_size="50KB")
    cases = numerics_cases(BLOCK_SIZE)
    reference = reference_logits(folder, cases)
    assert reference.error(split_logits(folder, num_ranks, cases)) <= reference.bound


def test_a_bias_behind_experts_of_a_latent_is_added_once(tmp_path):
    chosen = tiny_model("nemotron_3_super")
    folder = build_model_folder(tmp_path, replace(chosen, overrides=chosen.overrides | {"mlp_bias": True}))
    cases = numerics_cases(BLOCK_SIZE)[:2]
    reference = reference_logits(folder, cases)
    assert reference.error(split_logits(folder, 2, cases)) <= reference.bound


def test_the_demo_model_draws_the_tokens_that_one_rank_draws():
    cases = [NumericsCase(random_tokens(40, vocab_size=4096)), NumericsCase(random_tokens(9, seed=1, vocab_size=4096))]
    whole, _ = load_model(DEMO_MODEL_DIR, progress=False)
    expected = HandTables(whole, BLOCK_SIZE).compute(cases, 16)
    for ours, theirs in zip(split_logits(DEMO_MODEL_DIR, 2, cases, 16), expected, strict=True):
        assert float((ours - theirs).abs().max()) < 1e-4
        assert torch.equal(ours.argmax(1), theirs.argmax(1))


@pytest.fixture
def kernels():
    pytest.importorskip("numba")
    compiled.switch(on=True)
    yield
    compiled.switch(on=False)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize(("bits", "vocab"), [("int8", VOCAB), ("int4", VOCAB), ("fp8", VOCAB), ("int8", ODD), ("fp8", ODD)])
def test_weights_of_few_bits_are_split_too(tmp_path, bits, vocab, monkeypatch):
    """Each rank has groups or scales of its own of what is cut by its inputs, so that the error is about one rank's."""
    if bits == "fp8":  # which the engine has on a device alone
        monkeypatch.setattr(loader, "compute_dtype", lambda *given, **options: torch.float32)
    folder = build_model_folder(tmp_path, with_vocabulary("llama", vocab))
    cases = [NumericsCase(random_tokens(30))]
    reference = reference_logits(folder, cases)
    whole, _ = load_model(folder, dtype=bits, progress=False)
    alone = reference.error(HandTables(whole, BLOCK_SIZE).compute(cases, 7))
    assert reference.error(split_logits(folder, 2, cases, dtype=bits)) < 1.5 * alone


def test_k_and_v_in_fewer_bits_are_those_of_one_rank(tmp_path):
    """A head of a token has a scale of its own, so that each rank stores its heads as one rank would store them."""
    folder = build_model_folder(tmp_path, tiny_model("llama"))
    config = EngineConfig(model=str(folder), kv_dtype="int8", progress=False)

    def compute(split):
        on_arena = load_rank_model(config, split)
        runner = on_arena(torch.zeros(1 << 20, dtype=torch.uint8)[: (1 << 20) // size(split) * size(split)], BLOCK_SIZE, False)
        tokens, table = random_tokens(13), np.array([3, 1, 4, 2], np.int32)
        runner.forward(build_batch([ScheduledRow(tokens[:-1], 0, table)], BLOCK_SIZE))
        return runner.forward(build_batch([ScheduledRow(tokens[-1:], 12, table)], BLOCK_SIZE))

    def size(split):
        decoder = config_of_rank(read_model_config(folder), split)
        return QuantisedLayout(2, decoder.num_kv_heads, 16, BLOCK_SIZE, FORMATS["int8"], torch.float32).block_bytes

    (alone,) = on_ranks(1, compute)
    first, second = on_ranks(2, compute)
    assert second.shape == (1, 0)
    assert float((first - alone).abs().max()) < 1e-4 < float(alone.abs().max())


def test_a_rank_reads_its_part_alone(tmp_path, monkeypatch):
    folder = build_model_folder(tmp_path, tiny_model("llama"))
    read: list[int] = []
    take = StoredTensor.__getitem__

    def noted(self, part):
        found = take(self, part)
        read.append(found.numel())
        return found

    monkeypatch.setattr(StoredTensor, "__getitem__", noted)
    counts = []
    for rank in range(2):
        read.clear()
        load_model(folder, progress=False, split=Split(rank, 2))
        counts.append(sum(read))
    of_layer = 64 * (64 + 2 * 32) + 64 * 64 + 3 * 64 * 128
    assert counts == [VOCAB * HIDDEN + LAYERS * of_layer // 2 + (2 * LAYERS + 1) * HIDDEN] * 2


@pytest.mark.parametrize(("name", "vocab", "of_each"), [("llama", VOCAB, 256), ("llama_tied", VOCAB, 256), ("llama", ODD, 258)])
def test_the_vocabulary_takes_as_many_bytes_as_a_rank_has_rows_of_it(name, vocab, of_each, tmp_path, monkeypatch):
    folder = build_model_folder(tmp_path, with_vocabulary(name, vocab))
    allocate, num_bytes = filling._allocate, 0

    def noted(*shape, **options):
        nonlocal num_bytes
        made = allocate(*shape, **options)
        num_bytes += made.nbytes if len(shape) == 2 and options["device"].type != "meta" else 0
        return made

    monkeypatch.setattr(filling, "_allocate", noted)

    def count(split):
        nonlocal num_bytes
        num_bytes = 0
        load_model(folder, progress=False, split=split)
        return num_bytes

    num_matrices = 1 if name == "llama_tied" else 2
    alone = count(WHOLE) - num_matrices * vocab * HIDDEN * 4
    assert [count(Split(rank, 2)) for rank in range(2)] == [alone // 2 + num_matrices * of_each * HIDDEN * 4] * 2


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_a_vocabulary_that_the_ranks_do_not_divide_has_all_its_logits(num_ranks, tmp_path):
    folder = build_model_folder(tmp_path, with_vocabulary("qwen3_tied", ODD))
    cases = numerics_cases(BLOCK_SIZE)
    reference = reference_logits(folder, cases)
    found = split_logits(folder, num_ranks, cases)
    assert {logits.shape[1] for logits in found} == {ODD}
    assert reference.error(found) <= reference.bound


def test_each_row_of_the_vocabulary_is_on_one_rank():
    for vocab in (1, 3, 8, 13, 512, ODD):
        for num_ranks in (1, 2, 3, 4, 8):
            runs = [Split(rank, num_ranks).of_vocabulary(vocab) for rank in range(num_ranks)]
            assert [row for run in runs for row in run] == list(range(vocab))
            assert max(map(len, runs)) == WHOLE.num_rows(vocab) if num_ranks == 1 else Split(0, num_ranks).num_rows(vocab)


def test_logits_that_nothing_needs_are_not_gathered(tmp_path):
    folder = build_model_folder(tmp_path, tiny_model("llama"))

    def compute(split):
        model, _ = load_model(folder, progress=False, split=split)
        layout = make_kv_layout(model.config, model.dtype, BLOCK_SIZE)
        runner = ModelRunner(model, layout.view(torch.zeros(8 * layout.block_bytes, dtype=torch.uint8)), layout)
        batch = build_batch([ScheduledRow(random_tokens(13), 0, np.array([3, 1, 4, 2], np.int32))], BLOCK_SIZE)
        shapes = [runner.forward(batch).shape]
        num_bytes = split.together.num_bytes
        shapes.append(runner.forward(replace(batch, logit_rows=batch.logit_rows[:0])).shape)
        assert split.together.num_bytes == num_bytes
        return shapes, num_bytes

    of_rows = VOCAB // 2 * 4
    first, second = [(1, VOCAB), (0, VOCAB)], [(1, 0), (0, 0)]
    assert on_ranks(2, compute) == [(first, of_rows), (second, of_rows)]


@pytest.mark.parametrize("name", ["llama", "llama_tied", "gemma2"])
def test_ranks_that_meet_over_gloo_have_the_likeliest_tokens_of_one(name, tmp_path):
    folder = build_model_folder(tmp_path, with_vocabulary(name, ODD))
    cases = numerics_cases(BLOCK_SIZE)

    def compute(split):
        model, _ = load_model(folder, progress=False, split=split)
        return HandTables(model, BLOCK_SIZE).compute(cases, 7)

    alone = compute(WHOLE)
    for logits, expected in zip(over_gloo(2, tmp_path / "store", compute)[0], alone, strict=True):
        assert float((logits - expected).abs().max()) < 1e-4
        assert torch.equal(logits.argmax(1), expected.argmax(1))


def test_damage_that_shows_when_a_part_is_read_is_told(tmp_path, monkeypatch):
    class Broken:
        def get_shape(self):
            return [2, 2]

        def __getitem__(self, part):
            raise OSError(5, "a test")

    with pytest.raises(WeightsError, match=r"^file: is damaged or unreadable"):
        StoredTensor("file", Broken())[(slice(None),)]


@pytest.mark.parametrize(
    ("name", "num_ranks", "words"),
    [
        ("llama", 3, "attention heads, 4"),
        ("llama", 8, "attention heads, 4"),
        ("olmo2", 2, "norms over all heads"),
        ("deepseek_v3", 8, "attention heads, 4"),
        ("qwen3_5_27b", 4, "key heads of linear attention, 2"),
        ("qwen3_next", 2, "key heads of linear attention, 1"),
        ("nemotron_3_nano", 4, "groups of its scans, 2"),
    ],
)
def test_models_that_cannot_be_split_so_are_refused(name, num_ranks, words, tmp_path):
    folder = build_model_folder(tmp_path, tiny_model(name))
    with pytest.raises(UnsupportedModelError, match=words):
        load_model(folder, progress=False, split=Split(0, num_ranks))


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        (
            "llama",
            {"num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 16},
            "divisors or multiples of the 3 KV heads",
        ),
        ("llama", {"intermediate_size": 129}, "inner width, 129"),
        ("lfm2", {"hidden_size": 63, "head_dim": 16}, "channels of its convolutions, 63"),
        ("qwen3_5_35b_a3b", {"shared_expert_intermediate_size": 33}, "inner width of the shared expert, 33"),
    ],
)
def test_numbers_that_do_not_divide_are_told(name, changes, words, tmp_path):
    folder = build_model_folder(tmp_path, tiny_model(name))
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    with pytest.raises(UnsupportedModelError, match=words):
        config_of_rank(read_model_config(folder), Split(0, 2))


def test_each_kv_head_is_on_a_rank_that_has_its_queries():
    for num_ranks in (1, 2, 4, 8):
        for num_kv_heads in (1, 2, 4, 8):
            for rank in range(num_ranks):
                split = Split(rank, num_ranks)
                heads, kv_heads = split.of(8), split.of_kv_heads(num_kv_heads)
                assert {head * num_kv_heads // 8 for head in heads} == set(kv_heads)


def toy_tokens(num_ranks, spoil):
    """The next token that the first rank's toy says, with a slot of one rank's arena overwritten before it reads."""
    config, tokens = HashToyConfig(), [3, 1, 4, 1, 5]

    def compute(split):
        layout = config.kv_layout(BLOCK_SIZE)
        view = layout.view(torch.zeros(4 * layout.block_bytes, dtype=torch.uint8))
        runner = HashToyRunner(config, view, layout, split)
        table = np.array([2, 1], np.int32)
        runner.forward(build_batch([ScheduledRow(tokens[:-1], 0, table)], BLOCK_SIZE))
        if split.rank == spoil:
            view[2, 0, 1, 3] += 1
        logits = runner.forward(build_batch([ScheduledRow(tokens[-1:], len(tokens) - 1, table)], BLOCK_SIZE))
        return int(logits.argmax(1)[0])

    return on_ranks(num_ranks, compute)[0], expected_next_token(tokens)


def test_the_toy_finds_a_wrong_slot_in_the_arena_of_any_rank():
    said, expected = toy_tokens(3, spoil=None)
    assert said == expected
    for rank in range(3):
        said, expected = toy_tokens(3, spoil=rank)
        assert said != expected


def test_one_rank_adds_nothing_up():
    part = torch.ones(2)
    assert WHOLE.together.add_up(part) is part
