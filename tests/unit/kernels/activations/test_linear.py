"""linear against its reference, packed and plain, also where packing fails."""

import pytest
import torch

from kvkeeper.kernels import reference
from kvkeeper.kernels.activations.linear import linear, pack_linear
from kvkeeper.kernels.errors import KernelArgumentError, UnsupportedDeviceError
from kvkeeper.kernels.types import LinearWeight


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(7, 5), (1, 3), (192, 64)])
def test_packed_and_plain_agree_with_the_reference(shape, bias):
    weight = LinearWeight(torch.randn(shape), torch.randn(shape[0]) if bias else None)
    packed = pack_linear(weight)
    assert packed.packed == torch.backends.mkldnn.is_available()
    assert pack_linear(packed) is packed
    for num_rows in (0, 1, 2, 16, 33):
        x = torch.randn(num_rows, 2 * shape[1])[:, : shape[1]]
        expected = reference.linear(x, weight)
        torch.testing.assert_close(linear(x, weight), expected, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(linear(x, packed), expected, rtol=1e-5, atol=1e-5)


def test_half_weights_stay_plain():
    weight = LinearWeight(torch.randn(4, 4).half())
    assert pack_linear(weight) is weight


def test_a_torch_without_the_packed_op_computes_all_the_same(monkeypatch):
    def refuse(*_):
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(torch.ops.mkldnn, "_reorder_linear_weight", refuse)
    weight = LinearWeight(torch.randn(4, 3))
    assert pack_linear(weight) is weight
    assert linear(torch.randn(2, 3), weight).shape == (2, 4)


def test_a_packed_weight_that_lies_in_another_way_is_not_read_in_blocks(monkeypatch):
    weight = LinearWeight(torch.randn(130, 8))
    reorder = torch.ops.mkldnn._reorder_linear_weight
    assert pack_linear(weight).blocks is not None
    for other in (weight.data.flip(0), weight.data.flip(1), weight.data[:64], torch.cat((weight.data[:129], torch.ones(1, 8)))):
        monkeypatch.setattr(torch.ops.mkldnn, "_reorder_linear_weight", lambda *_, other=other: reorder(other, None))
        assert pack_linear(weight).blocks is None


def test_a_torch_that_does_not_tell_where_a_weight_lies_computes_all_the_same(monkeypatch):
    def refuse(*_):
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(torch.ops.mkldnn, "data_ptr", refuse, raising=False)
    weight = LinearWeight(torch.randn(4, 3))
    packed, x = pack_linear(weight), torch.randn(1, 3)
    assert packed.packed
    assert packed.blocks is None
    torch.testing.assert_close(linear(x, packed), reference.linear(x, weight), rtol=1e-5, atol=1e-5)


def test_refusals():
    for packed in (LinearWeight(torch.randn(4, 3)), pack_linear(LinearWeight(torch.randn(4, 3)))):
        with pytest.raises(KernelArgumentError, match="does not fit"):
            linear(torch.randn(2, 4), packed)
        with pytest.raises(KernelArgumentError, match="does not fit"):
            linear(torch.randn(2, 3).half(), packed)
        with pytest.raises(UnsupportedDeviceError):
            linear(torch.randn(2, 3, device="meta"), packed)
