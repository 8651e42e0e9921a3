"""Where every stored tensor of a Hugging Face checkpoint goes in the decoder's fused matrices, or which part of it a rank's."""

from collections.abc import Iterator
from functools import partial

import torch

from kvkeeper.kernels.types import LinearWeight

from ..checkpoint.destination import ALL, Destination, Empty, take_all
from ..config import ModelConfig
from ..decoder import DecoderWeights, LayerWeights
from ..experts import BesideWeights, ExpertWeights, MlpWeights, StackedExperts, Weight, beside_destinations
from ..families.family import ExpertNames
from ..families.table import FAMILIES
from ..latent import LatentWeights
from ..latent_config import LatentConfig
from ..layer_inputs import InputWeights, allocate_inputs, allocate_layer_input, input_destinations, layer_input_destinations
from ..projections import by_inputs, by_outputs, empty_projection, row_places, scaled, whole_range
from ..recurrent.mixer import allocate_mixer
from ..split import Split, config_of_rank

Destinations = dict[str, Destination]  # by the names that tensors are stored under


def allocate_layer(config: ModelConfig, split: Split, index: int, empty: Empty) -> tuple[LayerWeights, Destinations]:
    """Empty weights of one layer of a rank, and the destinations that together fill them. config: of the whole model."""
    own = config_of_rank(config, split)
    layer = _allocate_layer(own, index, empty)
    found = _layer_destinations(config, own, index, layer, split)
    destinations = {f"model.layers.{index}.{name.removeprefix('.')}": destination for name, destination in found}
    return layer, _as_stored(destinations, config)


def allocate_rest(config: ModelConfig, split: Split, empty: Empty) -> tuple[DecoderWeights, Destinations]:
    """The same of all but the layers."""
    (embed, to_embed), norm = _vocabulary(config, split, empty), empty(config.hidden_size)
    destinations = {"model.embed_tokens.weight": to_embed, "model.norm.weight": take_all(norm)}
    lm_head = embed
    if not config.tied_embeddings:
        lm_head, destinations["lm_head.weight"] = _vocabulary(config, split, empty)
    inputs: InputWeights | None = None
    if config.layer_inputs is not None:
        inputs = allocate_inputs(config.layer_inputs, config.num_layers, config.hidden_size, empty)
        destinations |= {f"model.{name}": destination for name, destination in input_destinations(inputs)}
    return DecoderWeights(embed, [], norm, LinearWeight(lm_head), inputs), _as_stored(destinations, config)


def _vocabulary(config: ModelConfig, split: Split, empty: Empty) -> tuple[torch.Tensor, Destination]:
    """A rank's rows of a matrix of the vocabulary's rows."""
    own, size = split.of_vocabulary(config.vocab_size), config.hidden_size
    rows = empty(split.num_rows(config.vocab_size), size)
    rows[len(own) :].zero_()
    return rows, Destination(rows[: len(own)], (config.vocab_size, size), places=row_places(own))


def _as_stored(destinations: Destinations, config: ModelConfig) -> Destinations:
    return {_stored_name(name, config.family): destination for name, destination in destinations.items()}


def _stored_name(name: str, family: str) -> str:
    for own, other in FAMILIES[family].stored_names.items():
        name = name.replace(own, other)
    return name


def _allocate_mlp(config: ModelConfig, width: int, empty: Empty) -> MlpWeights:
    gate_up = empty_projection(empty, (2 if config.has_gates else 1) * width, config.hidden_size, config.mlp_bias)
    return MlpWeights(gate_up, empty_projection(empty, config.hidden_size, width, config.mlp_bias))


def _allocate_layer(config: ModelConfig, index: int, empty: Empty) -> LayerWeights:
    hidden, (num_kv_heads, head_dim) = config.hidden_size, config.kv_heads(index)
    num_stored = 0 if index >= config.num_kv_layers else 1 if index in config.keys_as_values else 2
    num_heads = config.num_heads * (2 if config.has_output_gate else 1) + num_stored * num_kv_heads

    latent, recurrent = config.latent, config.recurrent
    shape = recurrent.shape if recurrent is not None and index in recurrent.layers else None
    num_outputs = config.num_heads * (head_dim if latent is None else latent.widths.value)
    o = (num_outputs, config.o_bias) if shape is None else (shape.num_outputs, shape.has_bias)
    has_mlp, has_o, attends = config.has_mlp(index), index in config.mixing, index in config.attending
    mlp: MlpWeights | ExpertWeights | None = None
    if config.experts is not None and index in config.experts.layers:
        mlp = _allocate_experts(config, index, empty)
    elif has_mlp:
        mlp = _allocate_mlp(config, config.mlp_width(index), empty)
    return LayerWeights(
        input_norm=None if config.norms == "after" or not has_o else empty(hidden),
        qkv=empty_projection(empty, num_heads * head_dim, hidden, config.qkv_bias) if latent is None and attends else None,
        qk_norm=_allocate_qk_norm(config, index, empty) if attends else None,
        o=empty_projection(empty, hidden, *o) if has_o else None,
        post_norm=None if config.norms == "after" or not has_mlp else empty(hidden),
        mlp=mlp,
        attention_out_norm=None if config.norms == "before" else empty(hidden),
        mlp_out_norm=None if config.norms == "before" else empty(hidden),
        sink_logits=empty(config.num_heads).float() if config.has_sink_logits else None,
        latent=_allocate_latent(config, latent, empty) if latent is not None and attends else None,
        mixer=None if shape is None else allocate_mixer(shape, hidden, empty),
        value_norm=empty(num_kv_heads, head_dim).fill_(1) if config.has_value_norm and num_stored else None,
        own_input=None if config.layer_inputs is None else allocate_layer_input(config.layer_inputs, hidden, empty),
        scale=empty(1) if config.has_layer_scales else None,
    )


def _allocate_qk_norm(config: ModelConfig, index: int, empty: Empty) -> torch.Tensor | None:
    if config.qk_norm == "none" or (config.qk_norm == "unit" and index in config.unrotated):
        return None
    num_kv_heads, head_dim = config.kv_heads(index)
    weight = empty(config.num_heads + (num_kv_heads if index < config.num_kv_layers else 0), head_dim)
    return weight.fill_(1) if config.qk_norm == "unit" else weight


def _allocate_latent(config: ModelConfig, latent: LatentConfig, empty: Empty) -> LatentWeights:
    """A bias is zero for queries that have none: it is one for all that is projected together."""
    widths, rank = latent.widths, latent.query_rank
    num_query = config.num_heads * (widths.key + widths.rope)
    num_out = (rank or num_query) + widths.latent + widths.rope
    return LatentWeights(
        down=LinearWeight(empty(num_out, config.hidden_size), empty(num_out).zero_() if config.qkv_bias else None),
        query_norm=None if rank is None else empty(rank),
        query_up=None if rank is None else LinearWeight(empty(num_query, rank)),
        norm=empty(widths.latent),
        up=empty(config.num_heads, widths.key + widths.value, widths.latent),
        gate=LinearWeight(empty(config.num_heads, config.hidden_size)) if latent.has_head_gates else None,
    )


def _allocate_experts(config: ModelConfig, index: int, empty: Empty) -> ExpertWeights:
    experts, stored = config.experts, FAMILIES[config.family].experts
    assert experts is not None and stored is not None, "these layers come from that family"
    num, hidden, inner, latent = experts.num_experts, config.hidden_size, experts.intermediate_size, experts.latent_size

    def stack(num_out: int, num_in: int) -> LinearWeight:
        return LinearWeight(empty(num, num_out, num_in), empty(num, num_out) if stored.has_bias else None)

    stacked = StackedExperts(stack((2 if config.has_gates else 1) * inner, latent or hidden), stack(latent or hidden, inner))
    beside: BesideWeights | None = None
    if experts.are_beside:
        beside = BesideWeights(_allocate_mlp(config, config.mlp_width(index), empty), *(empty(hidden) for _ in range(4)))
    return ExpertWeights(
        router=LinearWeight(empty(num, hidden), empty(num) if stored.has_bias else None),
        routing=experts.routing,
        correction=empty(num).float() if stored.routing.has_correction else None,
        shared=_allocate_mlp(config, experts.shared_size, empty) if experts.shared_size else None,
        shared_gate=LinearWeight(empty(1, hidden)) if stored.shared_gate else None,
        stacked=stacked,
        scales=None if beside is None else empty(num),
        beside=beside,
        enter=empty_projection(empty, latent, hidden, config.mlp_bias) if latent else None,
        leave=empty_projection(empty, hidden, latent, config.mlp_bias) if latent else None,
    )


def _layer_destinations(
    config: ModelConfig, own: ModelConfig, index: int, layer: LayerWeights, split: Split
) -> Iterator[tuple[str, Destination]]:
    """(name within the layer, destination) of every stored tensor. own: of the rank."""
    is_inner = layer.attention_out_norm is not None  # then the name of the norm between is that of attention's own
    for name, norm in (
        ("input_layernorm", layer.input_norm),
        ("pre_feedforward_layernorm" if is_inner else "post_attention_layernorm", layer.post_norm),
        ("post_attention_layernorm", layer.attention_out_norm),
        ("post_feedforward_layernorm", layer.mlp_out_norm),
    ):
        if norm is not None:
            yield f"{name}.weight", take_all(norm)
    num_kv_heads, head_dim = config.kv_heads(index)
    q_rows, kv_rows = scaled(split.of(config.num_heads), head_dim), scaled(split.of_kv_heads(num_kv_heads), head_dim)
    q_size, kv_size = config.num_heads * head_dim, num_kv_heads * head_dim
    stored = [
        ("self_attn.q_proj", q_size, q_rows),
        ("self_attn.k_proj", kv_size, kv_rows),
        ("self_attn.v_proj", kv_size, kv_rows),
    ]
    stored = stored[:1] if index >= config.num_kv_layers else stored[:2] if index in config.keys_as_values else stored
    if config.latent is not None and layer.latent is not None:
        value = config.latent.widths.value
        yield from _latent_destinations(config, config.latent, layer.latent, split)
        yield from by_inputs(layer.o, "self_attn.o_proj", config.num_heads * value, scaled(split.of(config.num_heads), value))
    elif config.recurrent is not None and layer.mixer is not None:
        shape = config.recurrent.shape
        yield from layer.mixer.destinations(shape, split.of)
        yield from by_inputs(layer.o, shape.output, shape.num_outputs, split.of(shape.num_outputs))
    elif layer.qkv is not None:
        if config.has_output_gate:
            yield from _gated_queries(layer.qkv, config, split)
            stored = stored[1:]
        is_fused = FAMILIES[config.family].is_fused
        yield from by_outputs(_stored_alone(layer.qkv, own), stored, "self_attn.qkv_proj" if is_fused else "")
        yield from by_inputs(layer.o, "self_attn.o_proj", q_size, q_rows)
    if layer.sink_logits is not None:
        yield (
            "self_attn.sinks",
            Destination(layer.sink_logits, (config.num_heads,), places=row_places(split.of(config.num_heads))),
        )
    yield from _mlp_destinations(config, index, layer.mlp, split)
    if layer.own_input is not None:
        yield from layer_input_destinations(layer.own_input)
    if layer.scale is not None:
        yield "layer_scalar", take_all(layer.scale)
    if layer.qk_norm is not None and config.qk_norm != "unit":
        for name, part in (("q_norm", layer.qk_norm[: own.num_heads]), ("k_norm", layer.qk_norm[own.num_heads :])):
            if len(part) == 0:
                continue
            is_whole = config.qk_norm == "whole"  # otherwise one stored weight is for all heads of a kind
            yield f"self_attn.{name}.weight", take_all(part.flatten()) if is_whole else Destination(part, (head_dim,))


def _stored_alone(qkv: Weight, config: ModelConfig) -> LinearWeight:
    """The rows of queries, keys and values; without queries that are stored with a gate. config: of the rank."""
    assert isinstance(qkv, LinearWeight), "weights are quantised when all are read"
    if not config.has_output_gate:
        return qkv
    first, end = config.num_heads * config.head_dim, (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
    return LinearWeight(qkv.data[first:end], None if qkv.bias is None else qkv.bias[first:end])


def _gated_queries(qkv: Weight, config: ModelConfig, split: Split) -> Iterator[tuple[str, Destination]]:
    """Stored is each head's queries and then its gate. They go to the first and to the last rows."""
    assert isinstance(qkv, LinearWeight), "weights are quantised when all are read"
    own, dims = split.of(config.num_heads), config.head_dim
    heads, places = len(own), row_places(scaled(own, 2 * dims))
    for kind, whole_part in (("weight", qkv.data), ("bias", qkv.bias)):
        if whole_part is not None:
            rest, inner = whole_part.shape[1:], whole_part.stride(0)
            to_gate = (len(whole_part) - heads * dims) * inner
            part = whole_part.as_strided((heads, 2, dims, *rest), (dims * inner, to_gate, inner, *whole_part.stride()[1:]))
            size = 2 * config.num_heads * dims
            yield f"self_attn.q_proj.{kind}", Destination(part, (size, *rest), partial(_in_turn, dims), places)


def _in_turn(dims: int, stored: torch.Tensor) -> torch.Tensor:
    return stored.unflatten(0, (-1, 2, dims))


def _mlp_destinations(
    config: ModelConfig, index: int, mlp: MlpWeights | ExpertWeights | None, split: Split
) -> Iterator[tuple[str, Destination]]:
    names, width = ("gate_proj" if config.has_gates else "", "up_proj", "down_proj"), config.mlp_width(index)
    members = {FAMILIES[config.family].mlp: mlp} if isinstance(mlp, MlpWeights) else {}
    if isinstance(mlp, ExpertWeights) and mlp.beside is not None:
        yield from _mlp_destinations(config, index, mlp.beside.mlp, split)
        yield from beside_destinations(mlp, mlp.beside)
    if isinstance(mlp, ExpertWeights):
        stored = FAMILIES[config.family].experts
        assert stored is not None and config.experts is not None, "these layers come from that family"
        for kind, part in (("weight", mlp.router.data), ("bias", mlp.router.bias)):
            if part is not None:
                yield f"{stored.block}.{stored.router}.{kind}", take_all(part)
        width = config.experts.intermediate_size
        if mlp.correction is not None:
            yield f"{stored.block}.{stored.router}.e_score_correction_bias", take_all(mlp.correction)
        if mlp.shared is not None:
            shared = config.experts.shared_size
            yield from _mlp_parts(mlp.shared, f"{stored.block}.{stored.shared}", names, shared, split.of(shared), False)
        for name, weight in (("fc1_latent_proj", mlp.enter), ("fc2_latent_proj", mlp.leave)):
            if isinstance(weight, LinearWeight):
                yield from by_outputs(weight, [(f"{stored.block}.{name}", *whole_range(len(weight.data)))], "")
        if mlp.shared_gate is not None:
            yield f"{stored.block}.{stored.shared_gate}.weight", take_all(mlp.shared_gate.data)
        assert mlp.stacked is not None, "nothing is packed yet"
        if stored.form != "single" and not config.experts.are_apart:
            yield from _stacked_destinations(stored, mlp.stacked, width, split.of(width))
            return
        names = stored.projections
        members = {f"{stored.block}.experts.{index}": expert for index, expert in enumerate(mlp.stacked.list_experts())}
    for place, member in members.items():
        yield from _mlp_parts(member, place, names, width, split.of(width), FAMILIES[config.family].is_fused)


def _mlp_parts(
    mlp: MlpWeights, place: str, names: tuple[str, str, str], width: int, own: range, is_fused: bool
) -> Iterator[tuple[str, Destination]]:
    """own: of the width, those of the rank. Without a name for a gate there is none."""
    *outer, down = names
    parts = [(f"{place}.{name}", width, own) for name in outer if name]
    yield from by_outputs(mlp.gate_up, parts, f"{place}.gate_up_proj" if is_fused else "")
    yield from by_inputs(mlp.down, f"{place}.{down}", width, own)


def _latent_destinations(
    config: ModelConfig, latent: LatentConfig, weights: LatentWeights, split: Split
) -> Iterator[tuple[str, Destination]]:
    """A bias is stored for what is projected down alone. That is whole on each rank, and what is of heads is its own heads'."""
    widths, down = latent.widths, weights.down
    assert isinstance(down, LinearWeight), "weights are quantised when all are read"
    num_kv = widths.latent + widths.rope
    num_query = down.data.shape[0] - num_kv
    heads = split.of(config.num_heads)

    def of_heads(name: str, size: int) -> list[tuple[str, int, range]]:
        return [(f"self_attn.{name}", config.num_heads * size, scaled(heads, size))]

    for kind, whole in (("weight", down.data), ("bias", down.bias)):
        if whole is not None:
            if latent.query_rank is not None:
                yield f"self_attn.q_a_proj.{kind}", take_all(whole[:num_query])
            yield f"self_attn.kv_a_proj_with_mqa.{kind}", take_all(whole[num_query:])
    queries: Weight = LinearWeight(down.data[:num_query])
    if weights.query_up is not None and weights.query_norm is not None:
        yield "self_attn.q_a_layernorm.weight", take_all(weights.query_norm)
        queries = weights.query_up
    name = "q_proj" if latent.query_rank is None else "q_b_proj"
    yield from by_outputs(queries, of_heads(name, widths.key + widths.rope), "")
    if weights.gate is not None:
        yield from by_outputs(weights.gate, of_heads("g_proj", 1), "")
    yield "self_attn.kv_a_layernorm.weight", take_all(weights.norm)
    yield from by_outputs(LinearWeight(weights.up.flatten(0, 1)), of_heads("kv_b_proj", widths.key + widths.value), "")


def _stacked_destinations(
    stored: ExpertNames, stacked: StackedExperts, width: int, own: range
) -> Iterator[tuple[str, Destination]]:
    """Inputs come before outputs, and each gate is followed by its up, or all gates by all ups; or as each is by itself.

    own: of the experts' width, those of the rank.
    """
    assert isinstance(stacked.gate_up, LinearWeight) and isinstance(stacked.down, LinearWeight), "nothing is quantised yet"
    gate_up, _, down = stored.projections
    if stored.form == "outputs_first":
        num, hidden, _ = stacked.down.data.shape

        def of_rank(found: torch.Tensor) -> torch.Tensor:
            return found.unflatten(1, (2, width))[:, :, own.start : own.stop].flatten(1, 2)

        yield f"{stored.block}.experts.gate_up_proj", Destination(stacked.gate_up.data, (num, 2 * width, hidden), of_rank)
        inputs = (*ALL * 2, slice(own.start, own.stop))
        yield f"{stored.block}.experts.{down}", Destination(stacked.down.data, (num, hidden, width), places=(inputs,))
        return
    pairs, are_halves = slice(2 * own.start, 2 * own.stop), stored.form == "halves"
    for name, weight, is_paired in ((gate_up, stacked.gate_up, True), (down, stacked.down, False)):
        for suffix, whole in (("", weight.data.transpose(1, 2)), ("_bias", weight.bias)):
            if whole is None:
                continue
            shape, place = list(whole.shape), tuple(ALL)
            if is_paired:
                shape[-1], place = 2 * width, (*ALL * (whole.ndim - 1), pairs)
            elif not suffix:
                shape[1], place = width, (*ALL, slice(own.start, own.stop))
            if is_paired and are_halves:
                yield f"{stored.block}.experts.{name}{suffix}", _halves(whole, tuple(shape), width, own)
                continue
            part = whole.unflatten(-1, (2, -1)).transpose(-1, -2) if is_paired else whole
            turned = _in_pairs if is_paired else None
            yield f"{stored.block}.experts.{name}{suffix}", Destination(part, tuple(shape), turned, (place,))


def _halves(whole: torch.Tensor, shape: tuple[int, ...], width: int, own: range) -> Destination:
    """Gates [..., own] and then ups, of as many gates and ups [..., width] in a stored tensor of `shape`."""

    def of_rank(stored: torch.Tensor) -> torch.Tensor:
        return stored.unflatten(-1, (2, width))[..., own.start : own.stop].flatten(-2)

    return Destination(whole, shape, of_rank)


def _in_pairs(stored: torch.Tensor) -> torch.Tensor:
    return stored.unflatten(-1, (-1, 2))
