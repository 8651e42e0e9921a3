"""Tables that were reserved for captured graphs: their rows, and their memory, which a graph reads by its address."""

import weakref

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from kvkeeper.engine_service.model.loader import load_model
from kvkeeper.engine_service.model.rope_config import RopeConfig
from kvkeeper.engine_service.model.rotary_table import RotaryTable
from tests.support.models.tiny_models import build_model_folder, tiny_model

HEAD_DIM, MOST = 16, 6000


class Tables(TorchDispatchMode):
    """What rows are selected from."""

    def __init__(self):
        super().__init__()
        self.read = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.overloadpacket.__name__ == "index_select":
            self.read.append(weakref.ref(args[0]))
        return function(*args, **(kwargs or {}))

    @property
    def addresses(self):
        return [table().data_ptr() for table in self.read]


def make_table(**options):
    return RotaryTable(RopeConfig(10_000.0), HEAD_DIM, torch.float32, torch.device("cpu"), MOST, **options)


def rows_of(table, *positions):
    """cos and sin as a captured step reads them: for all positions that were reserved."""
    return table.rows(torch.tensor(positions), max(positions))


def test_reserved_rows_are_those_of_a_table_that_was_as_large_from_the_start():
    table, large = make_table(), make_table(num_positions=MOST)
    assert table.reserve(300) == 1024, "there are as many already"
    assert table.reserve(2500) == 2500
    for found, expected in zip(rows_of(table, 0, 1023, 1024, 2499), rows_of(large, 0, 1023, 1024, 2499), strict=True):
        assert torch.equal(found, expected)
    assert table.reserve(MOST + 1) == MOST, "the model has no more"


@pytest.mark.parametrize("num_reserved", [300, 2500])
def test_a_reserved_table_stays_in_its_place_while_rows_within_it_are_read(num_reserved):
    table = make_table()
    last = table.reserve(num_reserved) - 1
    with Tables() as captured:
        table.rows(torch.tensor([5]), last)
    with Tables() as later:
        for _ in range(2):
            table.rows(torch.tensor([5, last]), last)
    assert later.addresses == 2 * captured.addresses


@pytest.mark.parametrize("num_reserved", [300, 2500])
def test_a_reserved_table_is_kept_when_a_sequence_goes_farther(num_reserved):
    """A graph holds its address alone: what would be given back is another tensor's by the next replay."""
    table = make_table()
    last = table.reserve(num_reserved) - 1
    with Tables() as captured:
        expected = table.rows(torch.tensor([5, last]), last)
    with Tables() as later:
        table.rows(torch.tensor([last + 1]), last + 1)
    assert not set(later.addresses) & set(captured.addresses), "there is a larger table"
    for read, rows in zip(captured.read, expected, strict=True):
        assert torch.equal(read()[[5, last]], rows)


def test_both_tables_of_a_model_are_reserved(tmp_path):
    """Gemma 3 rotates by another table where layers have windows."""
    gemma3 = tiny_model("gemma3")
    model, _ = load_model(build_model_folder(tmp_path, gemma3), progress=False)
    assert model.reserve_positions(3000) == 3000
    with Tables() as tables:
        for table in model._rotaries.values():
            table.rows(torch.tensor([2999]), 2999)
    assert [len(table()) for table in tables.read] == 4 * [3000]
