"""Which layers share a block: equal groups, little waste, full layers first."""

import pytest

from kvkeeper.engine_service.model.layer_groups import LayerGroup, find_places, group_layers


def pattern(num_layers: int, every: int, window: int = 512) -> tuple[int | None, ...]:
    return tuple(None if (layer + 1) % every == 0 else window for layer in range(num_layers))


def test_one_full_layer_in_six_makes_six_groups() -> None:
    groups = group_layers(pattern(24, 6))
    assert [len(group.layers) for group in groups] == [4] * 6
    assert [group.window for group in groups] == [None, *[512] * 5]
    assert groups[0].layers == (5, 11, 17, 23)


@pytest.mark.parametrize("num_layers", [2, 6, 7, 12, 18, 26, 34, 36, 48, 62, 80])
@pytest.mark.parametrize("every", [2, 3, 4, 6, 7])
def test_each_layer_has_one_place_and_little_is_wasted(num_layers: int, every: int) -> None:
    windows = pattern(num_layers, every)
    groups = group_layers(windows)
    if not groups:
        assert None not in windows
        return
    assert groups[0].window is None
    assert len(groups) <= 12
    size = max(len(group.layers) for group in groups)
    room = sum(size * (1 if group.window else 16) for group in groups)  # a full layer keeps 16 times as much
    assert room <= 1.1 * sum(1 if window else 16 for window in windows)
    assert all(len(group.layers) == size for group in groups if group.window is None)
    for layer, (group_idx, at) in enumerate(find_places(groups)):
        assert groups[group_idx].layers[at] == layer
        assert groups[group_idx].window == windows[layer]


def test_windows_of_two_lengths_are_apart() -> None:
    groups = group_layers((None, 8, 16, None, 8, 16))
    assert groups == (LayerGroup((0, 3), None), LayerGroup((1, 4), 8), LayerGroup((2, 5), 16))


def test_chunks_have_groups_of_their_own() -> None:
    groups = group_layers((None,) * 4, (8, 8, 8, None))
    assert groups == (LayerGroup((3,), None), *(LayerGroup((layer,), 8, True) for layer in range(3)))


@pytest.mark.parametrize("windows", [(None,) * 4, (8,) * 4, (8, 16), ()])
def test_where_one_table_serves_as_well_there_are_none(windows: tuple[int | None, ...]) -> None:
    assert group_layers(windows) == ()
