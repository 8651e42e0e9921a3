"""Plain-torch references of the ops, with the same signatures. Written to be read: token by token, float64 inside."""

import math
from collections.abc import Sequence

import torch

from .activations.linear_float8 import Float8Weight
from .activations.linear_integers import IntegerWeight
from .attention.retention import Retention
from .device_integers import DeviceIntegers
from .types import ConvInputs, CountedTensors, DeltaInputs, DeltaState, LinearWeight, StateChunks, StateRows


def store_kv(k: torch.Tensor, v: torch.Tensor, kv_layer: torch.Tensor, slot_mapping: torch.Tensor) -> None:
    """Reference of store_kv.store_kv."""
    block_size = kv_layer.shape[2]
    for row, slot in enumerate(slot_mapping.tolist()):
        if slot >= 0:
            kv_layer[slot // block_size, 0, slot % block_size] = k[row]
            kv_layer[slot // block_size, 1, slot % block_size] = v[row]


def store_latent(latent: torch.Tensor, rope: torch.Tensor, kv_layer: torch.Tensor, slot_mapping: torch.Tensor) -> None:
    """Reference of store_latent.store_latent."""
    block_size = kv_layer.shape[2]
    for row, slot in enumerate(slot_mapping.tolist()):
        if slot >= 0:
            kv_layer[slot // block_size, 0, slot % block_size, 0] = torch.cat((latent[row], rope[row]))


def copy_blocks(arena: torch.Tensor, pairs: Sequence[tuple[int, int]]) -> None:
    """Reference of copy_blocks.copy_blocks."""
    for source, destination in pairs:
        arena[destination] = arena[source].clone()


def paged_attention_decode(
    q: torch.Tensor,
    kv_layer: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    retention: Retention | None = None,
    q_sink: torch.Tensor | None = None,
    sink_logits: torch.Tensor | None = None,
) -> torch.Tensor:
    """Reference of paged_attention_decode.paged_attention_decode."""
    out = torch.zeros_like(q)
    kept = _kept(retention, len(seq_lens))
    sunk = q if q_sink is None else q_sink
    for seq, seq_len in enumerate(seq_lens.tolist()):
        if seq_len:
            k, v = _read_sequence(kv_layer, block_tables[seq], seq_len)
            out[seq] = _attend(q[seq], sunk[seq], k, v, seq_len - 1, scale, window, soft_cap, kept[seq], sink_logits)
    return out


def paged_attention_prefill(
    q: torch.Tensor,
    kv_layer: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    query_start_loc: torch.Tensor,
    *,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    retention: Retention | None = None,
    q_sink: torch.Tensor | None = None,
    sink_logits: torch.Tensor | None = None,
) -> torch.Tensor:
    """Reference of paged_attention_prefill.paged_attention_prefill."""
    out = torch.zeros_like(q)
    locs = query_start_loc.tolist()
    kept = _kept(retention, len(seq_lens))
    sunk = q if q_sink is None else q_sink
    for seq, seq_len in enumerate(seq_lens.tolist()):
        k, v = _read_sequence(kv_layer, block_tables[seq], seq_len)
        context_len = seq_len - (locs[seq + 1] - locs[seq])
        for row in range(locs[seq], locs[seq + 1]):
            position = context_len + row - locs[seq]
            out[row] = _attend(q[row], sunk[row], k, v, position, scale, window, soft_cap, kept[seq], sink_logits)
    return out


def latent_attention_decode(
    q: torch.Tensor,
    kv_layer: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    scale: float,
    latent: int,
) -> torch.Tensor:
    """Reference of latent_attention.latent_attention_decode."""
    return paged_attention_decode(q, kv_layer, block_tables, seq_lens, scale=scale)[..., :latent]


def latent_attention_prefill(
    q: torch.Tensor,
    kv_layer: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    query_start_loc: torch.Tensor,
    *,
    scale: float,
    latent: int,
) -> torch.Tensor:
    """Reference of latent_attention.latent_attention_prefill."""
    out = torch.zeros_like(q)[..., :latent]
    locs = query_start_loc.tolist()
    for seq, seq_len in enumerate(seq_lens.tolist()):
        for row in range(locs[seq], locs[seq + 1]):
            seen = torch.tensor([seq_len - (locs[seq + 1] - 1 - row)])
            args = (q[row : row + 1], kv_layer, block_tables[seq : seq + 1], seen)
            out[row] = latent_attention_decode(*args, scale=scale, latent=latent)[0]
    return out


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Reference of rms_norm.rms_norm."""
    if residual is not None:
        x = x.add_(residual)
    wide = x.double()
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps) * weight.double()
    return normed.to(x.dtype), x


def rotary(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Reference of rotary.rotary: (a, b) -> (a cos - b sin, b cos + a sin) of the two halves."""
    half = x.shape[2] // 2
    a, b = x[..., :half].double(), x[..., half:].double()
    c, s = cos[:, None, half:].double(), sin[:, None, half:].double()
    return torch.cat((a * c - b * s, b * c + a * s), dim=-1).to(x.dtype)


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """Reference of gates.silu_and_mul."""
    gate, up = gate_up.double().chunk(2, dim=-1)
    return (gate * torch.sigmoid(gate) * up).to(gate_up.dtype)


def gelu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """Reference of gates.gelu_and_mul."""
    gate, up = gate_up.double().chunk(2, dim=-1)
    gelu = 0.5 * gate * (1 + torch.tanh(math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)))
    return (gelu * up).to(gate_up.dtype)


def clamped_swiglu(gate_up: torch.Tensor, alpha: float, limit: float) -> torch.Tensor:
    """Reference of gates.clamped_swiglu."""
    gate, up = gate_up.double().chunk(2, dim=-1)
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return (gate * torch.sigmoid(alpha * gate) * (up + 1)).to(gate_up.dtype)


def square_of_relu(x: torch.Tensor) -> torch.Tensor:
    """Reference of gates.square_of_relu."""
    return (x.double().clamp(min=0) ** 2).to(x.dtype)


def linear(x: torch.Tensor, weight: LinearWeight) -> torch.Tensor:
    """Reference of linear.linear, for a weight that is not packed."""
    product = x.double() @ weight.data.double().T
    return (product if weight.bias is None else product + weight.bias.double()).to(x.dtype)


def restore_integers(weight: IntegerWeight) -> LinearWeight:
    """The dense weights [O, I] or [E, O, I] in float64 that integers on a device stand for."""
    assert isinstance(weight.blocks, DeviceIntegers)
    bits, words, scales, lows, factors = weight.blocks
    columns = []
    for column in range(weight.in_features):
        slab, place = divmod(column // 16, 32 // bits)
        integers = words[..., slab, :, column % 16] >> place * bits & (1 << bits) - 1
        pair, half = column // 64, column // 32 % 2
        low = -128 * scales[..., pair, :, half].double() if lows is None else lows[..., pair, :, half].double()
        columns.append((integers * scales[..., pair, :, half].double() + low) * factors.double())
    return LinearWeight(torch.stack(columns, -1), weight.bias)


def quantise_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Reference of linear_float8.quantise_rows."""
    codes, scales = torch.empty(x.shape, dtype=torch.float8_e4m3fn), torch.empty(len(x), 1)
    for row, numbers in enumerate(x.float()):
        largest = numbers.abs().max().clamp(min=1e-30)
        codes[row] = numbers * (torch.tensor(448.0) / largest)
        scales[row] = largest / 448
    return codes, scales


def linear_float8(x: torch.Tensor, weight: Float8Weight) -> torch.Tensor:
    """Reference of linear_float8.linear_float8."""
    codes, scales = quantise_rows(x.flatten(0, -2))
    product = (codes.double() * scales.double()) @ (weight.codes.double() * weight.scales.double().T).T
    product = product if weight.bias is None else product + weight.bias.double()
    return product.to(x.dtype).view(*x.shape[:-1], -1)


def grouped_linear(x: torch.Tensor, weight: LinearWeight, starts: torch.Tensor) -> torch.Tensor:
    """Reference of grouped_linear.grouped_linear."""
    out = torch.zeros(len(x), weight.data.shape[1], dtype=torch.float64)
    for group in range(len(weight.data)):
        for row in range(int(starts[group]), int(starts[group + 1])):
            out[row] = weight.data[group].double() @ x[row].double()
            if weight.bias is not None:
                out[row] += weight.bias[group].double()
    return out.to(x.dtype)


def penalise_counted(logits: torch.Tensor, counts: torch.Tensor, rows: CountedTensors) -> torch.Tensor:
    """Reference of penalise_counted.penalise_counted."""
    out = logits.clone()
    for row, (slot, token) in enumerate(zip(rows.slots.tolist(), rows.tokens.tolist(), strict=True)):
        counts[slot, token] += rows.addends[row].item()
        repetition, frequency, presence = rows.penalties[:, row].tolist()
        for seen in torch.nonzero(counts[slot]).flatten().tolist():
            value, num_outputs = out[row, seen], int(counts[slot, seen]) >> 1
            out[row, seen] = value / repetition if value > 0 else value * repetition
            if num_outputs:
                out[row, seen] -= torch.tensor(frequency * num_outputs + presence, dtype=torch.float32)
    return out


def delta_decode(inputs: DeltaInputs, state: DeltaState, rows: StateRows, out: torch.Tensor) -> None:
    """Reference of delta_rule.delta_decode."""
    tokens = range(len(out)) if rows.tokens is None else rows.tokens.tolist()
    for token, read, write in zip(tokens, rows.reads.tolist(), rows.writes.tolist(), strict=True):
        _write_state(state, write, *_take_tokens(inputs, [token], *_read_state(state, read), out))


def delta_prefill(inputs: DeltaInputs, state: DeltaState, chunks: StateChunks, out: torch.Tensor) -> None:
    """Reference of delta_rule.delta_prefill."""
    for row, read in enumerate(chunks.reads.tolist()):
        memory, window = _read_state(state, read)
        for chunk in range(int(chunks.starts[row]), int(chunks.starts[row + 1])):
            first = int(chunks.firsts[chunk])
            memory, window = _take_tokens(inputs, range(first, first + int(chunks.lens[chunk])), memory, window, out)
            _write_state(state, int(chunks.writes[chunk]), memory, window)


def short_conv(inputs: ConvInputs, window: torch.Tensor, rows: StateRows | StateChunks, out: torch.Tensor) -> None:
    """Reference of short_conv.short_conv."""
    if isinstance(rows, StateRows):
        tokens = torch.arange(len(out)) if rows.tokens is None else rows.tokens
        each = torch.arange(len(rows.reads))
        rows = StateChunks(rows.reads, torch.arange(len(each) + 1), each, tokens, torch.ones_like(each), rows.writes)
    for row, read in enumerate(rows.reads.tolist()):
        held = window[read].clone() if read else torch.zeros_like(window[0])
        for chunk in range(int(rows.starts[row]), int(rows.starts[row + 1])):
            first = int(rows.firsts[chunk])
            for token in range(first, first + int(rows.lens[chunk])):
                taken, leaves, given = inputs.mixed[token].chunk(3)
                held = torch.cat((held, (taken * given)[None]))
                made = (held.double() * inputs.conv.double().T).sum(0)
                made += 0 if inputs.bias is None else inputs.bias.double()
                out[token] = leaves * made.to(out.dtype)
                held = held[1:]
            if page := int(rows.writes[chunk]):
                window[page] = held


def gated_norm(
    x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float, *, is_sigmoid: bool = False
) -> torch.Tensor:
    """Reference of gated_norm.gated_norm."""
    wide, gates = x.double(), gate.double().view(x.shape)
    if weight.dim() == 2:
        wide = wide * gates * torch.sigmoid(gates)
        return (wide / torch.sqrt((wide * wide).mean(-1, keepdim=True) + eps) * weight.double()).to(x.dtype).flatten(1)
    normed = wide / torch.sqrt((wide * wide).mean(-1, keepdim=True) + eps) * weight.double()
    return (normed * (1.0 if is_sigmoid else gates) * torch.sigmoid(gates)).to(x.dtype).flatten(1)


def _read_state(state: DeltaState, page: int) -> tuple[torch.Tensor, torch.Tensor]:
    return tuple(each[page].double() if page else torch.zeros_like(each[0], dtype=torch.float64) for each in state)  # type: ignore[return-value]


def _write_state(state: DeltaState, page: int, memory: torch.Tensor, window: torch.Tensor) -> None:
    if page:
        state.memory[page], state.conv[page] = memory, window


def _take_tokens(
    inputs: DeltaInputs, tokens: Sequence[int], memory: torch.Tensor, window: torch.Tensor, out: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Write the outputs of some tokens of a sequence, and return its state behind them."""
    num_heads, key_dim, value_dim = memory.shape
    keys = (window.shape[1] - num_heads * value_dim) // 2
    each, memory, scan = num_heads * key_dim // keys, memory.clone(), inputs.scan
    for token in tokens:
        window = torch.cat((window, inputs.mixed[token].double()[None]))
        made = (window * inputs.conv.double().T).sum(0)
        made = torch.nn.functional.silu(made if scan is None else made + scan.conv_bias.double())
        window = window[1:]
        for head in range(num_heads):
            at = head // each * key_dim
            q, k, v = made[at:][:key_dim], made[keys + at :][:key_dim], made[2 * keys + head * value_dim :][:value_dim]
            if scan is not None:
                step = torch.nn.functional.softplus(inputs.gates[token, head].double() + inputs.decay_bias[head].double())
                step = step.clamp(scan.least, scan.most)
                memory[head] *= torch.exp(-torch.exp(inputs.decay_log[head].double()) * step)
                memory[head] += torch.outer(k, v * step)
                out[token, head] = q @ memory[head] + scan.skip[head].double() * v
                continue
            q, k = (x / torch.sqrt(x @ x + 1e-6) for x in (q, k))
            beta = inputs.gates[token, head].double()
            memory[head] *= torch.exp(_find_decay(inputs, token, head, num_heads, key_dim))
            memory[head] += torch.outer(k, (v - k @ memory[head]) * torch.sigmoid(beta))
            out[token, head] = q @ memory[head] * key_dim**-0.5
    return memory, window


def _find_decay(inputs: DeltaInputs, token: int, head: int, num_heads: int, key_dim: int) -> torch.Tensor:
    """The logarithm of what a token leaves of a head's matrix: [1, 1], or of each of its rows [Dk, 1]."""
    rate, channels = torch.exp(inputs.decay_log[head].double()), inputs.channels
    gates = inputs.gates[token, num_heads:] if channels is None else channels.gates[token]
    own = slice(head, head + 1) if channels is None else slice(head * key_dim, (head + 1) * key_dim)
    grown = (gates[own].double() + inputs.decay_bias[own].double())[:, None]
    if channels is not None and channels.least is not None:
        return channels.least * torch.sigmoid(rate * grown)
    return -rate * torch.nn.functional.softplus(grown)


def _read_sequence(kv_layer: torch.Tensor, table: torch.Tensor, seq_len: int) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V [seq_len, num_kv_heads, head_dim] in float64, read through the block table."""
    block_size = kv_layer.shape[2]
    slots = [(int(table[i // block_size]), i % block_size) for i in range(seq_len)]
    k = torch.stack([kv_layer[block, 0, offset] for block, offset in slots]).double()
    v = torch.stack([kv_layer[block, 1, offset] for block, offset in slots]).double()
    return k, v


def _kept(retention: Retention | None, num_seqs: int) -> list[tuple[int, int]]:
    """Sink and window of each sequence."""
    if retention is None:
        return [(0, 0)] * num_seqs
    return list(zip(*(column.tolist() for column in retention), strict=True))


def _attend(
    q: torch.Tensor,
    q_sink: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    position: int,
    scale: float,
    window: int | None,
    soft_cap: float | None,
    kept: tuple[int, int],
    sink_logits: torch.Tensor | None,
) -> torch.Tensor:
    """One query [num_heads, head_dim] at `position` over the keys it may see, one by one."""
    sink, own_window = kept
    seen, is_sink = [], []
    for j in range(position + 1):
        has_left = own_window > 0 and j <= position - own_window
        if (has_left and j >= sink) or (window is not None and j <= position - window):
            continue
        seen.append(j)
        is_sink.append(has_left)
    k, v = k[seen], v[seen]
    group = q.shape[0] // k.shape[1]
    heads = []
    for head, (query, sink_query) in enumerate(zip(q.double(), q_sink.double(), strict=True)):
        keys = k[:, head // group]
        scores = torch.where(torch.tensor(is_sink), keys @ sink_query, keys @ query) * scale
        if soft_cap is not None:
            scores = soft_cap * torch.tanh(scores / soft_cap)
        if sink_logits is not None:
            scores = torch.cat((scores, sink_logits[head].double()[None]))
        heads.append(torch.softmax(scores, dim=0)[: len(keys)] @ v[:, head // group])
    return torch.stack(heads).to(q.dtype)
