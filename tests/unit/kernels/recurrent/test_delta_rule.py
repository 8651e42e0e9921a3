"""The gated delta rule, or Mamba 2's, and its convolution on states in pages: on all paths, against transformers', and cut
anywhere.
"""

from itertools import pairwise

import pytest
import torch
from transformers.models.kimi_linear import modeling_kimi_linear as their_channels
from transformers.models.nemotron_h import modeling_nemotron_h as their_scan
from transformers.models.qwen3_next import modeling_qwen3_next as theirs

from kvkeeper.kernels import reference
from kvkeeper.kernels.errors import KernelArgumentError
from kvkeeper.kernels.recurrent.delta_rule import delta_decode, delta_prefill
from kvkeeper.kernels.recurrent.gated_norm import gated_norm
from kvkeeper.kernels.types import STATE_CHUNK, ChannelRule, DeltaInputs, DeltaState, ScanRule, StateChunks, StateRows

pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered")
SMALL, ODD, LARGE = (2, 4, 8, 6, 4), (1, 3, 5, 20, 3), (1, 1, 32, 64, 2)  # heads of keys and values, their dims, kernel
SCAN = (*SMALL, "scan")
CHANNELS, BOUNDED = (4, 4, 8, 6, 4, "channels"), (3, 3, 5, 20, 3, "bounded")
SHAPES = pytest.mark.parametrize("shape", [SMALL, ODD, LARGE, SCAN, CHANNELS, BOUNDED], ids=str)
NUM_PAGES = 8


def drawn(*shape, seed=0, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def make_inputs(shape, num_tokens, dtype=torch.float32, seed=0):
    """The mixed numbers and the gates are parts of wider rows. A scan's bounds are such that steps meet them."""
    keys, values, key_dim, value_dim, kernel = shape[:5]
    channels, kind = 2 * keys * key_dim + values * value_dim, "heads" if len(shape) == 5 else shape[5]
    is_scan = kind == "scan"
    mixed = drawn(num_tokens, channels + 5, seed=seed, dtype=dtype)[:, :channels]
    num_gates = 2 * values if kind == "heads" else values
    gates = drawn(num_tokens, num_gates + 3, seed=seed + 1, dtype=dtype)[:, :num_gates]
    conv = drawn(channels, kernel, seed=3, dtype=dtype)
    scan = ScanRule(drawn(channels, seed=8, dtype=dtype), drawn(values, seed=9), 0.4, 1.3) if is_scan else None
    rule, num_biases = None, values
    if kind in ("channels", "bounded"):
        num_biases = values * key_dim
        own = drawn(num_tokens, num_biases + 2, seed=seed + 10, dtype=dtype)[:, :num_biases]
        rule = ChannelRule(own, -1.5 if kind == "bounded" else None)
    return DeltaInputs(mixed, gates, conv, drawn(num_biases, seed=4), drawn(values, seed=5), scan, rule)


def part_of(inputs, first, last):
    """Those of some tokens."""
    channels, own = inputs.channels, slice(first, last)
    part = inputs._replace(mixed=inputs.mixed[own], gates=inputs.gates[own])
    return part if channels is None else part._replace(channels=channels._replace(gates=channels.gates[own]))


def make_state(shape, dtype=torch.float32):
    """Pages a stride apart, as they are in an arena; what stands in page 0 is not read."""
    keys, values, key_dim, value_dim, kernel = shape[:5]
    channels = 2 * keys * key_dim + values * value_dim
    memory = drawn(NUM_PAGES, 2, values, key_dim, value_dim, seed=6)[:, 1]
    conv = drawn(NUM_PAGES, 2, kernel - 1, channels, seed=7, dtype=dtype)[:, 1]
    memory[0], conv[0] = float("nan"), float("nan")
    return DeltaState(memory, conv)


def copied(state):
    strided = (each.as_strided(each.shape, each.stride()) for each in state)
    return DeltaState(*(torch.empty_strided(each.shape, each.stride(), dtype=each.dtype).copy_(each) for each in strided))


def integers(*numbers):
    return torch.tensor(numbers, dtype=torch.int64)


def chunks_of(rows):
    """rows: of each the page that it reads, and its chunks, (tokens, page that is written) each."""
    lens = [count for _, chunks in rows for count, _ in chunks]
    starts = [0]
    for _, chunks in rows:
        starts.append(starts[-1] + len(chunks))
    return StateChunks(
        integers(*(read for read, _ in rows)),
        integers(*starts),
        integers(*(row for row, (_, chunks) in enumerate(rows) for _ in chunks)),
        integers(*(sum(lens[:at]) for at in range(len(lens)))),
        integers(*lens),
        integers(*(page for _, chunks in rows for _, page in chunks)),
    )


def check(path, op, shape, num_tokens, rows, dtype=torch.float32, atol=2e-6):
    """The op's outputs and pages are the reference's."""
    inputs, state = make_inputs(shape, num_tokens, dtype), make_state(shape, dtype)
    own, out = copied(state), torch.zeros(num_tokens, shape[1], shape[3], dtype=dtype)
    expected = torch.zeros_like(out)
    getattr(reference, op.__name__)(inputs, state, rows, expected)

    def run(*args):
        op(*args)
        return out

    path(run)(inputs, own, rows, out)
    torch.testing.assert_close(out, expected, atol=atol, rtol=4 * atol)
    for found, wanted in zip(own, state, strict=True):
        torch.testing.assert_close(found, wanted, atol=atol, rtol=4 * atol, equal_nan=True)


@SHAPES
def test_decodes_are_the_references(path, shape):
    check(path, delta_decode, shape, 4, StateRows(None, integers(3, 0, 5, 0), integers(3, 2, 6, 0)))
    check(path, delta_decode, shape, 6, StateRows(integers(4, 1, 2), integers(1, 0, 4), integers(1, 2, 0)))


@pytest.mark.parametrize("shape", [SMALL, SCAN, CHANNELS], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_decodes_in_few_bits_are_as_near_as_those_are(path, dtype, shape):
    check(path, delta_decode, shape, 3, StateRows(None, integers(3, 0, 5), integers(3, 2, 6)), dtype, 0.02)


ROWS = [
    (0, [(2, 1), (STATE_CHUNK, 0), (5, 2)]),  # begins, and has a page behind two tokens
    (3, [(2, 3), (1, 4)]),  # in the page that it reads, then a shorter chunk than the convolution is long
    (5, [(STATE_CHUNK, 0), (7, 5)]),
    (6, [(3, 0)]),  # writes nothing
]


@SHAPES
def test_runs_are_the_references(path, shape):
    check(path, delta_prefill, shape, 148, chunks_of(ROWS), atol=1e-5)


@pytest.mark.parametrize("shape", [SMALL, CHANNELS], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_runs_in_few_bits_are_as_near_as_those_are(path, dtype, shape):
    if path.is_device and dtype is torch.bfloat16:
        pytest.skip("the interpreter multiplies matrices of bfloat16 as integers")
    check(path, delta_prefill, shape, 148, chunks_of(ROWS), dtype, 0.04)


@pytest.mark.parametrize("cuts", [(), (1,), (63, 64, 65), (16, 32, 48, 64, 80, 96), tuple(range(1, 100))], ids=len)
@pytest.mark.parametrize("shape", [SMALL, CHANNELS, BOUNDED], ids=str)
def test_outputs_and_states_do_not_depend_on_where_a_run_is_cut(path, cuts, shape):
    if path.is_device and len(cuts) not in (0, 3):
        pytest.skip("the interpreter takes long")
    inputs, state = make_inputs(shape, 100), make_state(shape)
    out, whole = (torch.zeros(100, shape[1], shape[3]) for _ in range(2))
    reference.delta_prefill(inputs, state, chunks_of([(0, [(100, 1)])]), whole)
    read = 0
    for first, last in pairwise((0, *cuts, 100)):
        part = part_of(inputs, first, last)
        lens = [min(STATE_CHUNK, last - at) for at in range(first, last, STATE_CHUNK)]
        if last - first > 1:
            rows, op = chunks_of([(read, [(count, 2 * (at == len(lens) - 1)) for at, count in enumerate(lens)])]), delta_prefill
        else:
            rows, op = StateRows(None, integers(read), integers(2)), delta_decode

        def run(*args, op=op):
            op(*args)
            return args[-1]

        path(run)(part, state, rows, out[first:last])
        read = 2
    torch.testing.assert_close(out, whole, atol=2e-6, rtol=1e-5)
    torch.testing.assert_close(state.memory[2], state.memory[1], atol=2e-6, rtol=1e-5)
    assert torch.equal(state.conv[2], state.conv[1])


@pytest.mark.parametrize("shape", [LARGE, CHANNELS, BOUNDED], ids=str)
def test_a_run_has_the_very_numbers_of_its_tokens_one_by_one(path, shape):
    """And whatever rows are beside it: by the compiled kernel, which has one order of operations."""
    if path.name != "compiled":
        pytest.skip("torch and Triton have a chunked form")
    inputs, state = make_inputs(shape, 30), make_state(shape)
    outs = torch.zeros(2, 30, shape[1], shape[3])
    delta_prefill(inputs, state, chunks_of([(0, [(20, 1)]), (3, [(10, 4)])]), outs[0])
    for token in range(20):
        delta_decode(part_of(inputs, token, token + 1),
                     state, StateRows(None, integers(2 * (token > 0)), integers(2)), outs[1, token : token + 1])  # fmt: skip
    assert torch.equal(outs[0, :20], outs[1, :20])
    assert torch.equal(state.memory[1], state.memory[2])


def test_the_reference_is_transformers_rule_behind_its_convolution():
    inputs, state = make_inputs(SMALL, 70), make_state(SMALL)
    out, (keys, values, key_dim, value_dim, _) = torch.zeros(70, 4, 6), SMALL
    reference.delta_prefill(inputs, state, chunks_of([(0, [(70, 1)])]), out)
    made = theirs.causal_conv1d_fn(inputs.mixed.T[None], inputs.conv, activation="silu")[0].T
    q, k, v = made.split((keys * key_dim, keys * key_dim, values * value_dim), 1)
    q, k = (each.unflatten(1, (-1, key_dim)).repeat_interleave(values // keys, 1)[None] for each in (q, k))
    beta, gate = inputs.gates.chunk(2, 1)
    decay = -inputs.decay_log.exp() * torch.nn.functional.softplus(gate + inputs.decay_bias)
    expected, last = theirs.torch_recurrent_gated_delta_rule(
        q, k, v.unflatten(1, (-1, value_dim))[None], decay[None], beta.sigmoid()[None],
        output_final_state=True, use_qk_l2norm_in_kernel=True,
    )  # fmt: skip
    torch.testing.assert_close(out, expected[0], atol=2e-6, rtol=1e-5)
    torch.testing.assert_close(state.memory[1], last[0], atol=2e-6, rtol=1e-5)
    assert torch.equal(state.conv[1], inputs.mixed[-3:])


@pytest.mark.parametrize("shape", [CHANNELS, (4, 4, 8, 8, 3, "bounded")], ids=str)
def test_the_reference_is_transformers_rule_of_channels(shape):
    inputs, state = make_inputs(shape, 70), make_state(shape)
    out, (keys, _, key_dim, value_dim, kernel, _) = torch.zeros(70, shape[1], shape[3]), shape
    reference.delta_prefill(inputs, state, chunks_of([(0, [(70, 1)])]), out)
    made = their_channels.causal_conv1d_fn(inputs.mixed.T[None], inputs.conv, activation="silu")[0].T
    q, k, v = made.split((keys * key_dim, keys * key_dim, keys * value_dim), 1)
    q, k, v = (each.unflatten(1, (keys, -1))[None] for each in (q, k, v))
    grown, least = (inputs.channels.gates + inputs.decay_bias).unflatten(1, (keys, -1))[None], inputs.channels.least
    rates = inputs.decay_log.exp()[:, None]
    decay = -rates * torch.nn.functional.softplus(grown) if least is None else least * torch.sigmoid(rates * grown)
    for rule in (their_channels.recurrent_kimi_delta_attention, their_channels.chunk_kimi_delta_attention):
        expected, last = rule(
            q, k, v, decay, inputs.gates.sigmoid()[None],
            initial_state=None, output_final_state=True, use_qk_l2norm_in_kernel=True,
        )  # fmt: skip
        torch.testing.assert_close(out, expected[0], atol=5e-6, rtol=1e-5)
        torch.testing.assert_close(state.memory[1], last[0], atol=5e-6, rtol=1e-5)
    assert torch.equal(state.conv[1], inputs.mixed[1 - kernel :])


def test_the_reference_is_transformers_scan_behind_its_convolution():
    inputs, state = make_inputs(SCAN, 70), make_state(SCAN)
    out, scan, (keys, values, key_dim, value_dim, _) = torch.zeros(70, 4, 6), inputs.scan, SMALL
    reference.delta_prefill(inputs, state, chunks_of([(0, [(70, 1)])]), out)
    made = their_scan.causal_conv1d_fn(inputs.mixed.T[None], inputs.conv, scan.conv_bias, activation="silu")[0].T
    q, k, v = made.split((keys * key_dim, keys * key_dim, values * value_dim), 1)
    expected, last = their_scan.mamba2_chunk_scan(
        v.unflatten(1, (-1, value_dim))[None], inputs.gates[None], -inputs.decay_log.exp(),
        k.unflatten(1, (-1, key_dim))[None], q.unflatten(1, (-1, key_dim))[None],
        chunk_size=16, D=scan.skip, dt_bias=inputs.decay_bias, dt_softplus=True, dt_limit=(scan.least, scan.most),
        return_final_states=True,
    )  # fmt: skip
    torch.testing.assert_close(out, expected[0], atol=5e-6, rtol=1e-5)
    torch.testing.assert_close(state.memory[1], last[0].transpose(1, 2), atol=5e-6, rtol=1e-5)


@pytest.mark.parametrize("is_behind", [False, True], ids=["before the gate", "behind it"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_gated_norm_is_the_references(path, dtype, is_behind):
    x, weight = drawn(5, 3, 20, dtype=dtype), drawn(*((3, 20) if is_behind else (20,)), seed=1, dtype=dtype)
    gate = drawn(5, 70, seed=2, dtype=dtype)[:, 10:]
    found = path(gated_norm)(x, gate, weight, 1e-2)
    atol = 1e-6 if dtype is torch.float32 else 0.03
    torch.testing.assert_close(found, reference.gated_norm(x, gate, weight, 1e-2), atol=atol, rtol=atol)
    if not is_behind:
        found, wanted = (run(x, gate, weight, 1e-2, is_sigmoid=True) for run in (path(gated_norm), reference.gated_norm))
        torch.testing.assert_close(found, wanted, atol=atol, rtol=atol)


@pytest.mark.parametrize(
    ("changes", "argument"),
    [
        ({"mixed": torch.zeros(4, 7)}, "mixed"),
        ({"gates": torch.zeros(4, 7)}, "gates"),
        ({"conv": torch.zeros(9, 4)}, "conv"),
        ({"conv": torch.zeros(56, 5)}, "window"),
        ({"decay_log": torch.zeros(4).double()}, "decay_log"),
        ({"scan": ScanRule(torch.zeros(56), torch.zeros(4), 0.0, 1.0)}, "gates"),
        ({"channels": ChannelRule(torch.zeros(4, 32), None)}, "gates"),
        ({"channels": ChannelRule(torch.zeros(4, 32), None), "gates": torch.zeros(4, 4)}, "channels"),
        ({"scan": ScanRule(torch.zeros(55), torch.zeros(4), 0.0, 1.0), "gates": torch.zeros(4, 4)}, "conv_bias"),
        ({"scan": ScanRule(torch.zeros(56), torch.zeros(3), 0.0, 1.0), "gates": torch.zeros(4, 4)}, "skip"),
    ],
)
def test_what_does_not_fit_is_refused(path, changes, argument):
    inputs, rows = make_inputs(SMALL, 4)._replace(**changes), StateRows(None, *[integers(1, 2, 3, 4)] * 2)
    with pytest.raises(KernelArgumentError, match=f"delta_decode: {argument}"):
        path(delta_decode)(inputs, make_state(SMALL), rows, torch.zeros(4, 4, 6))
    for other in (rows._replace(reads=rows.reads.int()), rows._replace(tokens=torch.zeros(2, 2).long())):
        with pytest.raises(KernelArgumentError, match=r"reads|tokens"):
            path(delta_decode)(make_inputs(SMALL, 4), make_state(SMALL), other, torch.zeros(4, 4, 6))
    with pytest.raises(KernelArgumentError, match="gate"):
        path(gated_norm)(torch.zeros(2, 3, 4), torch.zeros(2, 11), torch.zeros(4), 1e-6)
    with pytest.raises(KernelArgumentError, match="out"):
        path(delta_decode)(make_inputs(SMALL, 4), make_state(SMALL), rows, torch.zeros(4, 4, 5))
