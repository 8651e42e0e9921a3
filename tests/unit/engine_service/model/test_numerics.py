"""Teacher-forced logits through the paged cache against transformers, with hand-made block tables.

The arena is NaN wherever nothing was written, block ids are shuffled, and prefix hits, forks with a copied tail and
preemptions happen on the way. The bound is that of docs/inside/reliability.md: 1e-5, and 5 times transformers' own
eager-against-SDPA difference in the same run; a dropped token must exceed it 1,000 times.
"""

import dataclasses
import json
import math
import shutil

import numpy as np
import pytest
import torch
import transformers

from kvkeeper.engine_service.model.decoder import Decoder
from kvkeeper.engine_service.model.loader import load_model
from kvkeeper.engine_service.model.recurrent.short_conv_config import ShortConvShape
from tests.support.models.tiny_models import (
    TINY_MODELS,
    NumericsCase,
    ReferenceLogits,
    TinyModel,
    build_model_folder,
    choose_all_experts,
    has_sdpa,
    logits_of,
    numerics_cases,
    quiet_transformers,
    random_tokens,
    reference_logits,
    tiny_model,
)
from tests.support.worlds.hand_tables import HandTables

torch.set_num_threads(1)
pytestmark = [pytest.mark.usefixtures("kernel_path"), pytest.mark.each_value]

BLOCK_SIZES = (4, 16)


@dataclasses.dataclass(frozen=True, slots=True)
class World:
    """A loaded model, the cases, and transformers' logits of them."""

    model: Decoder
    block_size: int
    cases: tuple[NumericsCase, ...]
    reference: ReferenceLogits


@pytest.fixture(scope="module", params=TINY_MODELS, ids=lambda model: model.name)
def folder(request, tmp_path_factory):
    return build_model_folder(tmp_path_factory.mktemp("model"), request.param)


@pytest.fixture(scope="module", params=BLOCK_SIZES)
def world(request, folder):
    cases = numerics_cases(request.param)
    model, _ = load_model(folder, progress=False)
    return World(model, request.param, cases, reference_logits(folder, cases))


@pytest.mark.parametrize("chunk_size", [1, 7, "block size", 64])
def test_logits_are_those_of_transformers(world, chunk_size):
    tables = HandTables(world.model, world.block_size)
    found = tables.compute(world.cases, world.block_size if chunk_size == "block size" else chunk_size)
    error = world.reference.error(found)
    assert error <= world.reference.bound
    assert tables.num_copies == (0 if tables.num_state_groups else 2)


def test_greedy_tokens_are_those_of_transformers(folder):
    """By induction: after each prefix of the library's greedy text, the likeliest token is its next."""
    prompt = random_tokens(5)
    with quiet_transformers():
        network = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
        longer = {"max_new_tokens": 24, "min_new_tokens": 24}  # an end of the text would be none
        longer["use_cache"] = False  # with its cache, it bounds no step of Mamba 2
        text = network.generate(torch.tensor([prompt]), do_sample=False, eos_token_id=None, pad_token_id=0, **longer)[0]
    assert len(text) == 29
    tables = HandTables(load_model(folder, progress=False)[0], 4)
    (found,) = tables.compute([NumericsCase(tuple(text.tolist()))], 1)
    assert found.argmax(1)[4:-1].tolist() == text[5:].tolist()


def test_the_noise_is_not_nothing(world, folder):
    """Where transformers has both kinds of attention."""
    assert (1e-7 < world.reference.noise < 1e-5) if has_sdpa(folder) else world.reference.noise == math.inf


@pytest.mark.parametrize(("dtype", "bound"), [("float16", 0.02), ("bfloat16", 0.15)])
def test_16_bit_computation_is_close(folder, dtype, bound, tmp_path):
    """Far below what a dropped token does (see below), in the same paths."""
    folder = shutil.copytree(folder, tmp_path / "model")
    choose_all_experts(folder)
    model, _ = load_model(folder, dtype=dtype, progress=False)
    cases = numerics_cases(4)
    reference = reference_logits(folder, cases)
    recurrent = model.config.recurrent
    has_products = recurrent is not None and isinstance(recurrent.shape, ShortConvShape)  # of projections with each other
    if model.config.embed_scale is not None or has_products:  # larger numbers: held to what transformers errs by itself
        bound = 1.5 * reference.error(logits_of(folder, cases, getattr(torch, dtype)))
    assert reference.error(HandTables(model, 4).compute(cases, 7)) < bound


@pytest.mark.parametrize("chunk_size", [1, 64])
def test_a_dropped_token_exceeds_the_bound_a_thousand_times(world, chunk_size, monkeypatch):
    cases, reference = world.cases, world.reference
    (index,) = [i for i, case in enumerate(cases) if case.fork_len == 3 * world.block_size - 1]
    case = NumericsCase(cases[index].tokens)
    dropped = len(case.tokens) - 3

    def drop(batch):
        slots = np.where(batch.positions == dropped, -1, batch.slot_mapping)
        return dataclasses.replace(batch, slot_mapping=slots)

    tables = HandTables(world.model, world.block_size, fill=0.0)
    forward = tables.runner.forward
    monkeypatch.setattr(tables.runner, "forward", lambda batch: forward(drop(batch)))
    (found,) = tables.compute([case], chunk_size)
    errors = (found - reference.eager[index]).abs().amax(dim=1)
    assert float(errors[:dropped].max()) <= reference.bound
    assert float(errors[dropped:].min()) > 1000 * reference.bound


def test_a_prompt_longer_than_the_first_rotary_table(tmp_path):
    """The table of cosines starts at 1,024 positions and grows."""
    model_of = tiny_model("mistral_window")
    folder = build_model_folder(tmp_path, model_of)
    cases = [NumericsCase(random_tokens(1100))]
    reference = reference_logits(folder, cases)
    tables = HandTables(load_model(folder, progress=False)[0], 4, num_blocks=300)
    assert reference.error(tables.compute(cases, 500)) <= reference.bound


YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"attention_factor": 1.3},
        {"mscale": 0.7, "mscale_all_dim": 1.2},
        {"beta_fast": 8, "beta_slow": 2},
        {"truncate": False},
        {"factor": 1.0},
        {"original_max_position_embeddings": 4096},
    ],
)
def test_yarn_is_that_of_transformers_beyond_the_original_length(changes, tmp_path):
    """A config that names a factor alone, as model cards advise, is served to the length that this gives."""
    kind = TinyModel("qwen2", "Qwen2", {"max_position_embeddings": 64, "rope_parameters": YARN | changes})
    folder = build_model_folder(tmp_path, kind)
    cases = [NumericsCase(random_tokens(200))]
    reference = reference_logits(folder, cases)
    model, config = load_model(folder, progress=False)
    assert config.max_position == int(config.rope.factor * config.rope.original_max_position)
    assert reference.error(HandTables(model, 16).compute(cases, 64)) <= reference.bound


LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.5] * 8,
    "long_factor": [4.0] * 8,
    "original_max_position_embeddings": 64,
}


@pytest.mark.parametrize("changes", [{}, {"factor": 4.0}, {"attention_factor": 1.3}])
@pytest.mark.parametrize("family", ["Llama", "Qwen2"])
def test_longrope_is_that_of_transformers_up_to_the_original_length(family, changes, tmp_path):
    folder = build_model_folder(tmp_path, TinyModel("longrope", family, {"rope_parameters": LONGROPE | changes}))
    cases = [NumericsCase(random_tokens(60))]
    reference = reference_logits(folder, cases)
    model, config = load_model(folder, progress=False)
    assert config.max_position == 64
    assert reference.error(HandTables(model, 16).compute(cases, 7)) <= reference.bound


def test_an_original_length_beside_the_rope_has_the_last_word(tmp_path):
    """As in transformers, for all kinds of scaling."""
    llama3 = tiny_model("llama_llama3_rope").overrides["rope_parameters"]
    for index, rope in enumerate((YARN, llama3)):
        overrides = {"rope_parameters": dict(rope), "original_max_position_embeddings": 16}
        folder = build_model_folder(tmp_path / str(index), TinyModel("llama", "Llama", overrides))
        path = folder / "config.json"  # the library writes its own decision there
        raw = json.loads(path.read_text())
        raw["rope_parameters"]["original_max_position_embeddings"] = rope["original_max_position_embeddings"]
        path.write_text(json.dumps(raw | {"original_max_position_embeddings": 16}))
        cases = [NumericsCase(random_tokens(40))]
        reference = reference_logits(folder, cases)
        model, config = load_model(folder, progress=False)
        assert config.rope.original_max_position == 16
        assert reference.error(HandTables(model, 16).compute(cases, 64)) <= reference.bound
