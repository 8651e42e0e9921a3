"""The gated delta rule and its convolution against transformers', whole and cut anywhere."""

import pytest
import torch
from transformers.models.qwen3_next import modeling_qwen3_next as theirs

from kvkeeper.engine_service.model.recurrent.delta_config import DeltaNetShape
from kvkeeper.engine_service.model.recurrent.delta_net import DeltaState, convolve, convolve_one, delta_rule, delta_rule_one

torch.set_num_threads(1)
SHAPE = DeltaNetShape(2, 4, 8, 6, 4)
FIRST = DeltaState(  # of a sequence without tokens
    torch.zeros(SHAPE.num_value_heads, SHAPE.key_dim, SHAPE.value_dim), torch.zeros(SHAPE.kernel - 1, SHAPE.conv_dim)
)


def run(num_tokens: int) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(num_tokens)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=draw)

    keys, values = (num_tokens, SHAPE.num_key_heads, SHAPE.key_dim), (num_tokens, SHAPE.num_value_heads, SHAPE.value_dim)
    gates = -normal(num_tokens, SHAPE.num_value_heads).abs(), normal(num_tokens, SHAPE.num_value_heads).sigmoid()
    return {"q": normal(*keys), "k": normal(*keys), "v": normal(*values), "decay": gates[0], "beta": gates[1]}


@pytest.mark.parametrize("cuts", [(), (1,), (63, 64, 65), (16, 32, 48, 64, 80, 96), tuple(range(1, 100))], ids=len)
def test_outputs_and_states_do_not_depend_on_where_a_run_is_cut(cuts: tuple[int, ...]) -> None:
    tokens = run(100)
    batch = {"query": tokens["q"], "key": tokens["k"], "value": tokens["v"], "g": tokens["decay"], "beta": tokens["beta"]}
    expected, last = theirs.torch_recurrent_gated_delta_rule(
        **{name: each[None] for name, each in batch.items()}, output_final_state=True, use_qk_l2norm_in_kernel=True
    )
    memory, outputs = FIRST.memory, []
    for start, end in zip((0, *cuts), (*cuts, 100), strict=True):
        made, memory = delta_rule(**{name: each[start:end] for name, each in tokens.items()}, memory=memory)
        outputs.append(made)
    torch.testing.assert_close(torch.cat(outputs), expected[0], atol=2e-6, rtol=1e-5)
    torch.testing.assert_close(memory, last[0], atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("cut", [1, 2, 3, 4, 17])
def test_the_convolution_goes_on_from_its_last_inputs(cut: int) -> None:
    draw = torch.Generator().manual_seed(0)
    mixed, weight = (torch.randn(shape, generator=draw) for shape in ((20, SHAPE.conv_dim), (SHAPE.conv_dim, SHAPE.kernel)))
    expected = theirs.causal_conv1d_fn(mixed.T[None], weight, activation="silu")[0].T
    conv, outputs = FIRST.conv, []
    for part in (mixed[:cut], mixed[cut:]):
        made, conv = convolve(part, conv, weight)
        outputs.append(made)
    torch.testing.assert_close(torch.cat(outputs), expected, atol=1e-6, rtol=1e-5)
    assert torch.equal(conv, mixed[-3:])


@pytest.mark.parametrize("behind", [1, 5])
def test_single_tokens_of_several_sequences_are_those_of_each(behind: int) -> None:
    """Which the numerics of the family hold to transformers."""
    sequences = [run(behind + 1 + number) for number in range(3)]
    weight = torch.randn((SHAPE.conv_dim, SHAPE.kernel), generator=torch.Generator().manual_seed(1))
    first, made, inputs = FIRST, [], []
    for tokens in sequences:
        before, last = ({name: each[part] for name, each in tokens.items()} for part in (slice(-1), slice(-1, None)))
        memory = delta_rule(**before, memory=first.memory)[1] if len(before["v"]) else first.memory
        mixed = torch.cat([each.flatten(1) for each in (tokens["q"], tokens["k"], tokens["v"])], 1)
        _, conv = convolve(mixed[:-1], first.conv, weight)
        made.append((*delta_rule(**last, memory=memory), *convolve(mixed[-1:], conv, weight)))
        inputs.append((memory, conv, mixed[-1], *(last[name][0] for name in ("q", "k", "v", "decay", "beta"))))
    memory, conv, mixed, q, k, v, decay, beta = (torch.stack(each) for each in zip(*inputs, strict=True))
    found = (*delta_rule_one(q, k, v, decay, beta, memory), *convolve_one(mixed, conv, weight))
    expected = [
        torch.stack([each.squeeze(0) if at in (0, 2) else each for each in of]) for at, of in enumerate(zip(*made, strict=True))
    ]
    for ours, theirs_ in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs_, atol=2e-6, rtol=1e-5)
