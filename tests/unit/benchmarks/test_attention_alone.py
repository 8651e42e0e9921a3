"""One attention by itself with K and V in few bits, against the kernels that store and read them so."""

import dataclasses

import pytest
import torch

from kvkeeper.kernels import reference
from kvkeeper.kernels.quantised.attention import plan_rows, quantised_decode
from kvkeeper.kernels.quantised.formats import FORMATS
from kvkeeper.kernels.quantised.layout import QuantisedLayout, get_layer
from kvkeeper.kernels.quantised.store import plan_slots, store_quantised
from tests.benchmarks.attention_alone import AttentionInputs, error_alone

LENGTH, SIZE, HEADS, DIM = 22, 4, 2, 8


def inputs(**changes: object) -> AttentionInputs:
    generator = torch.Generator().manual_seed(4)
    queries = torch.randn((2, 2 * HEADS, DIM), generator=generator)
    keys, values = torch.randn((2, LENGTH, HEADS, DIM), generator=generator)
    made = AttentionInputs(
        queries, keys, values, torch.tensor([9, LENGTH - 1]), torch.tensor([LENGTH, LENGTH]), 0.4, None, None, None
    )
    return dataclasses.replace(made, **changes)


@pytest.mark.parametrize("name", ["int8", "int4", "fp8"])
@pytest.mark.parametrize("tail_from", [LENGTH, 12])
@pytest.mark.parametrize(
    "options", [{}, {"window": 7, "soft_cap": 0.8}, {"sink_logits": torch.tensor([0.3, 2.0, -1.0, 5.0])}], ids=str
)
def test_the_error_is_that_of_the_kernels(name: str, tail_from: int, options: dict[str, object]) -> None:
    given = inputs(tail_starts=torch.tensor([tail_from, tail_from]), **options)
    layout = QuantisedLayout(1, HEADS, DIM, SIZE, FORMATS[name], torch.float32, tail_layers=1)
    num_entries = -(-LENGTH // SIZE)
    layer = get_layer(layout.view(torch.zeros((1 + 2 * num_entries) * layout.block_bytes, dtype=torch.uint8)), layout, 0)
    table = torch.arange(1, 1 + num_entries, dtype=torch.int32)
    pages = torch.where(torch.arange(num_entries) * SIZE >= tail_from, table + num_entries, 0)
    at = torch.arange(LENGTH)
    slots, tail_slots = (tables[at // SIZE].long() * SIZE + at % SIZE for tables in (table, pages))
    store_quantised(given.keys, given.values, layer, plan_slots(slots, torch.where(tail_slots < SIZE, -1, tail_slots), layer))
    plain = torch.stack((given.keys, given.values)).unflatten(1, (-1, 1)).transpose(0, 1)
    places = torch.arange(LENGTH, dtype=torch.int32)[None].repeat(2, 1)
    lens = (given.positions + 1).int()
    options = {"scale": given.scale, "window": given.window, "soft_cap": given.soft_cap, "sink_logits": given.sink_logits}
    exact = reference.paged_attention_decode(given.queries, plain, places, lens, **options)
    rows = plan_rows(table.repeat(2, 1), pages.int().repeat(2, 1), lens, None, layer)
    errors = (quantised_decode(given.queries, layer, rows, **options) - exact).abs() / exact.square().mean().sqrt()
    found = error_alone([given], FORMATS[name], torch.float32)
    assert found.mean == pytest.approx(float(errors.mean()), rel=2e-3)
    assert found.greatest == pytest.approx(float(errors.max()), rel=2e-3)


def test_16_bits_round_queries_keys_and_values_alike() -> None:
    given = inputs()
    assert error_alone([given], None, torch.float32).greatest == 0
    assert 1e-3 < error_alone([given], None, torch.bfloat16).mean < 0.02
    assert error_alone([given], FORMATS["int8"], torch.float32).mean < error_alone([given], FORMATS["int4"], torch.float32).mean
