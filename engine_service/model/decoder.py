"""Decoder: the forward pass of a Llama-like decoder-only transformer, for every family in config.py.

Follows transformers' models in the order of its operations, so that float32 logits agree to 1e-5. Projections
that read the same input are one matrix. K and V live in the arena and nowhere else.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.nn import functional

from kvkeeper.kernels.activations.add import add
from kvkeeper.kernels.activations.gates import clamped_swiglu, gelu_and_mul, silu_and_mul, square_of_relu, weigh_by_sigmoid
from kvkeeper.kernels.activations.linear import linear
from kvkeeper.kernels.activations.linear_integers import IntegerWeight
from kvkeeper.kernels.activations.rms_norm import rms_norm
from kvkeeper.kernels.activations.rotary import rotary
from kvkeeper.kernels.attention.latent_attention import latent_layer
from kvkeeper.kernels.quantised.store import rotary_store_quantised
from kvkeeper.kernels.rotary_store_kv import rotary_store_kv

from .attention import AttentionMetadata, StepAttention, attend_stored
from .config import ModelConfig
from .experts import ExpertWeights, MlpWeights, Weight, apply_beside, apply_mlp
from .latent import LatentWeights, latent_attention
from .layer_inputs import InputWeights, LayerInputWeights, gate_layer_input, make_layer_inputs
from .recurrent.mixer import Mixer
from .rotary_table import RotaryTable
from .split import WHOLE, Split
from .stored_attention import StoredAttention, StoredMetadata, attend_as_stored

Rotation = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One layer. H hidden, D head_dim, N and M query and kv heads; a bias or norm may be absent.

    Attributes:
        input_norm, post_norm: [H], of what attention and MLP take.
        attention_out_norm, mlp_out_norm: [H], of what they give, before it is added.
        qkv: [(N + 2 M) D, H]: queries, keys, values, and behind them the N D of an output gate, where the family has one; None:
            `latent` has what attention projects, or `mixer` what is there in the place of attention.
        qk_norm: [N + M, D], the norm's weight for every query and key head.
        o: [H, N D]; behind a mixer [H, as many as that gives]. None: the layer has an MLP alone, and mlp None: it has none.
        sink_logits: float32 [N], see paged_attention_decode.
        value_norm: ones [M, D], where values are normalised.
        own_input: what mixes in the layer's own input, at its end. scale: [1], factor of what the layer gives, behind that.

    A layer that reads the K and V of another one has queries alone in qkv and qk_norm. One whose values are its keys has no
    rows of values.
    """

    input_norm: torch.Tensor | None
    qkv: Weight | None
    qk_norm: torch.Tensor | None
    o: Weight | None
    post_norm: torch.Tensor | None
    mlp: MlpWeights | ExpertWeights | None
    attention_out_norm: torch.Tensor | None = None
    mlp_out_norm: torch.Tensor | None = None
    sink_logits: torch.Tensor | None = None
    latent: LatentWeights | None = None
    mixer: Mixer | None = None
    value_norm: torch.Tensor | None = None
    own_input: LayerInputWeights | None = None
    scale: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class DecoderWeights:
    """embed and lm_head are [vocab_size, H], one tensor when tied and not packed; norm is [H].

    Each of several ranks has a run of their rows, and zeros behind the last one.
    inputs: None where layers have no inputs of their own.
    """

    embed: torch.Tensor
    layers: list[LayerWeights]
    norm: torch.Tensor
    lm_head: Weight
    inputs: InputWeights | None = None


class _Turn(NamedTuple):
    """What a layer's queries and keys are turned by: cosines and sines [T, D].

    at_sinks: of the queries that score sinks; None: none do. growth [T, 1, 1]: factor of the queries; None: there is none.
    """

    rotation: Rotation
    at_sinks: Rotation | None
    growth: torch.Tensor | None = None


class LayersInput(NamedTuple):
    """What all layers together take of a step.

    Attributes:
        x: [T, H], the embedded tokens.
        turns: of each layer.
        metadata: of the step's attention.
        logit_rows: int64 [R], the tokens whose logits are wanted; None: all of them, in order.
        own: [T, L, P], inputs of each layer's own; None: there are none.
    """

    x: torch.Tensor
    turns: tuple[_Turn, ...]
    metadata: StepAttention | StoredAttention
    logit_rows: torch.Tensor | None
    own: torch.Tensor | None = None


Layers = Callable[[LayersInput], torch.Tensor]  # [R, V], what the product with the vocabulary gives for the wanted tokens


class Decoder:
    """A loaded model. Holds weights and rotary tables; no sequence, no K or V."""

    def __init__(self, config: ModelConfig, weights: DecoderWeights, *, split: Split = WHOLE) -> None:
        """weights: packed. config, split: of the rank that they are of."""
        self.config = config
        self.dtype = weights.embed.dtype
        self.device = weights.embed.device
        self._embed, self._norm = weights.embed, weights.norm
        self._lm_head, self._layers, self._inputs = weights.lm_head, weights.layers, weights.inputs
        self.split, self._add_up, self.is_whole = split, split.together.add_up, split.num_ranks == 1
        most = config.max_position
        self._ropes = [config.rotation(layer) for layer in range(config.num_layers)]
        self._rotaries = {rope: RotaryTable(*rope, self.dtype, self.device, most) for rope in dict.fromkeys(self._ropes)}
        # transformers rounds the factor to the model's dtype, in training too.
        self._embed_scale = config.embed_scale and torch.tensor(config.embed_scale, dtype=self.dtype, device=self.device)
        self.watch: Callable[[int, torch.Tensor, torch.Tensor], None] | None = None  # for measurements: see forward
        self._gate = _make_gate(config)

    def reserve_positions(self, num_positions: int) -> int:
        """Size the rotary tables once and for all, for at least so many positions or all of the model's. How many there are.

        The memory that a forward pass with `max_position` below that reads stays where it is. A later one that goes farther, as
        one of a sequence with sink and window may, has larger tables beside it.
        """
        return min(table.reserve(num_positions) for table in self._rotaries.values())

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        max_position: int,
        metadata: StepAttention | StoredAttention,
        logit_rows: torch.Tensor | None,
        logits_out: torch.Tensor | None = None,
        run_layers: Callable[[Layers, LayersInput], torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """Compute a step's tokens, writing their K and V into the arena.

        Args:
            token_ids, positions: int64 [T]; max_position is the highest of the positions.
            metadata: of the step, with views of the arena.
            logit_rows: int64 [R], the tokens whose logits are wanted; None: all of them, in order.
            logits_out: float32 [R, vocab_size], where the logits go; None: memory of their own. Not used where there are none.
            run_layers: how the layers are computed, see compute/decode_programs.py; None: one kernel after the other.

        Returns:
            Logits, float32 [R, vocab_size]; [R, 0] on all ranks but the first. The watch, where there is one, is given the
            number of each layer, its rotated queries [T, N, D], and what its heads attend to [T, N * D].
        """
        turns = tuple(self._turns(positions, metadata.sink_positions, max_position))
        x = self._embedded(token_ids)
        if self._embed_scale is not None:
            x = x * self._embed_scale
        own = None
        if self._inputs is not None:
            own = make_layer_inputs(token_ids, x, self._inputs, self.config.rms_norm_eps)
        layers, given = self._run_layers, LayersInput(x, turns, metadata, logit_rows, own)
        logits = layers(given) if run_layers is None or self.watch is not None else run_layers(layers, given)
        if self.config.logit_divisor is not None:
            logits = logits / self.config.logit_divisor
        if (cap := self.config.logit_soft_cap) is not None:
            logits = torch.tanh(logits / cap) * cap
        logits = self._gathered(logits)
        return logits.float() if logits_out is None else logits_out.copy_(logits)

    def _embedded(self, token_ids: torch.Tensor) -> torch.Tensor:
        """[T, H]: of tokens whose rows another rank has, that one's."""
        if self.is_whole:
            return functional.embedding(token_ids, self._embed)
        rows = token_ids - self.split.of_vocabulary(self.config.vocab_size).start
        is_elsewhere = (rows < 0) | (rows >= len(self._embed))
        own = functional.embedding(rows.masked_fill(is_elsewhere, 0), self._embed)
        return self._add_up(own.masked_fill(is_elsewhere[:, None], 0))

    def _gathered(self, part: torch.Tensor) -> torch.Tensor:
        """The logits [R, V] of all ranks' rows of the vocabulary, from [R, those of this one]; [R, 0] on all but the first."""
        if self.is_whole:
            return part
        parts = self.split.together.gather(part)
        if parts is None:
            return part.new_empty((len(part), 0))
        return parts.transpose(0, 1).flatten(1)[:, : self.config.vocab_size]

    def _run_layers(self, given: LayersInput) -> torch.Tensor:
        eps, metadata = self.config.rms_norm_eps, given.metadata
        x, own = given.x, given.own
        residual: torch.Tensor | None = None
        for index, layer in enumerate(self._layers):
            if layer.o is not None:
                x, residual = _add_and_norm(x, layer.input_norm, eps, residual)
            if layer.mixer is not None:
                assert isinstance(metadata, StepAttention), "states are not stored in another format"
                x = layer.mixer.run(x, eps, *metadata.get_states(index))
            elif layer.o is not None:
                of_layer, kv_layer = metadata.of_layer(index)
                x = self._attention(index, x, layer, given.turns[index], kv_layer, of_layer)
            if index + 1 == len(self._layers) and given.logit_rows is not None:  # K and V are written: the wanted rows go on
                x, residual = x.index_select(0, given.logit_rows), _pick(residual, given.logit_rows)
                own = _pick(own, given.logit_rows)
            if layer.o is not None:
                x = self._branch(self._add_up(linear(x, layer.o)), layer.attention_out_norm)
            if layer.mlp is not None:
                x, residual = _add_and_norm(x, layer.post_norm, eps, residual)
                x = self._branch(self._apply_mlp(x, residual, layer.mlp), layer.mlp_out_norm)
            if layer.scale is not None or layer.own_input is not None:
                assert residual is not None, "of what was added last"
                x, residual = self._end_layer(x, residual, layer, None if own is None else own[:, index]), None
        x, _ = rms_norm(x, self._norm, eps, residual)
        return linear(x, self._lm_head)

    def _apply_mlp(self, x: torch.Tensor, before: torch.Tensor, mlp: MlpWeights | ExpertWeights) -> torch.Tensor:
        """What the MLP gives for x, which is `before` as its norm gives it."""
        if isinstance(mlp, ExpertWeights) and mlp.beside is not None:
            return apply_beside(x, before, mlp, mlp.beside, self._gate, self.config.rms_norm_eps, self._add_up)
        return self._add_up(apply_mlp(x, mlp, self._gate))

    def _end_layer(
        self, x: torch.Tensor, residual: torch.Tensor, layer: LayerWeights, own: torch.Tensor | None
    ) -> torch.Tensor:
        """Their sum with the layer's own input, and scaled."""
        if layer.own_input is not None and own is not None:
            x = add(x, residual)
            residual = gate_layer_input(x, own, layer.own_input, self._gate, self.config.rms_norm_eps)
        return add(x, residual, layer.scale)

    @property
    def has_integers(self) -> bool:
        """Whether products have weights of integers."""
        return any(isinstance(layer.o, IntegerWeight) for layer in self._layers)

    @property
    def gives_logits(self) -> bool:
        """Whether forward does; of several ranks, those that do draw."""
        return self.split.is_first

    @property
    def sink_logits(self) -> tuple[torch.Tensor | None, ...]:
        """The sink logits of each layer, see paged_attention_decode."""
        return tuple(layer.sink_logits for layer in self._layers)

    def _turns(self, positions: torch.Tensor, sink_positions: torch.Tensor | None, max_position: int) -> list[_Turn]:
        """The rotation of each layer."""
        turns: dict[Any, _Turn] = {}
        for rope, table in self._rotaries.items():
            at_sinks = None if sink_positions is None else table.rows(sink_positions, max_position)
            turns[rope] = _Turn(table.rows(positions, max_position), at_sinks)
        if not (unrotated := self.config.unrotated):
            return [turns[rope] for rope in self._ropes]
        still = {rope: self._still(turn, positions) for rope, turn in turns.items()}
        return [(still if index in unrotated else turns)[rope] for index, rope in enumerate(self._ropes)]

    def _still(self, turn: _Turn, positions: torch.Tensor) -> _Turn:
        """The turn of layers that are not rotated, where that of others is this."""
        sinks = None if turn.at_sinks is None else _turn_nothing(turn.at_sinks)
        return _Turn(_turn_nothing(turn.rotation), sinks, self._growth(positions))

    def _growth(self, positions: torch.Tensor) -> torch.Tensor | None:
        """Factors of the queries of unrotated layers [T, 1, 1]."""
        if (temperature := self.config.temperature) is None:
            return None
        steps = ((positions.float() + 1.0) / temperature.step).floor()
        return (torch.log1p(steps) * temperature.growth + 1.0)[:, None, None]

    def _branch(self, x: torch.Tensor, out_norm: torch.Tensor | None) -> torch.Tensor:
        """What attention or MLP gave, as it is added to the residual."""
        if out_norm is not None:
            x, _ = rms_norm(x, out_norm, self.config.rms_norm_eps)
        return x if self.config.residual_scale is None else x * self.config.residual_scale

    def _norm_whole(self, heads: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Normalise heads [T, H, D] as one vector each token, with a weight [H, D]."""
        normed, _ = rms_norm(heads.flatten(1).contiguous(), weight.flatten(), self.config.rms_norm_eps)
        return normed.view(heads.shape)

    def _attention(
        self,
        index: int,
        x: torch.Tensor,
        layer: LayerWeights,
        turn: _Turn,
        kv_layer: torch.Tensor | None,
        metadata: AttentionMetadata | StoredMetadata,
    ) -> torch.Tensor:
        """Heads' outputs [T, N * D], before the output projection, of layer `index`."""
        config, window = self.config, self.config.windows[index]
        rotation, at_sinks, growth = turn
        if config.latent is not None and layer.latent is not None:
            assert isinstance(metadata, AttentionMetadata) and kv_layer is not None, "latents are not stored in another format"
            widths, scale = config.latent.widths, config.latent.scale
            return latent_attention(x, layer.latent, widths, scale, rotation, latent_layer(kv_layer), metadata)
        assert layer.qkv is not None, "a layer has either"
        num_kv_heads, head_dim = config.kv_heads(index)
        num_rotated = config.num_heads + (num_kv_heads if index < config.num_kv_layers else 0)
        qkv = linear(x, layer.qkv).unflatten(1, (-1, head_dim))
        first_value = config.num_heads if index in config.keys_as_values else num_rotated
        num_stored = num_rotated + num_kv_heads
        qk, v = qkv[:, :num_rotated], qkv[:, first_value : first_value + num_kv_heads]
        if layer.value_norm is not None:
            v, _ = rms_norm(v, layer.value_norm, config.rms_norm_eps)
        if growth is not None:
            queries = (qk[:, : config.num_heads] * growth).to(qk.dtype)
            qk = torch.cat((queries, qk[:, config.num_heads :]), 1)
        norm, q_sink = None, None
        if layer.qk_norm is not None and config.qk_norm == "whole":
            q, k = qk.tensor_split((config.num_heads,), 1)
            q_norm, k_norm = layer.qk_norm.tensor_split((config.num_heads,))
            qk = torch.cat((self._norm_whole(q, q_norm), self._norm_whole(k, k_norm)), 1)
        elif layer.qk_norm is not None:
            norm = (layer.qk_norm, config.qk_norm_eps)
        if at_sinks is not None:  # the normalised queries are rotated a second time
            if norm is not None:
                qk, norm = rms_norm(qk, *norm)[0], None
            q_sink = rotary(qk[:, : config.num_heads], *at_sinks)
        cap = config.attention_soft_cap
        if index >= config.num_kv_layers:  # another layer has stored what this one reads
            assert isinstance(metadata, AttentionMetadata) and kv_layer is not None, "refused in another format"
            q = rotary(qk if norm is None else rms_norm(qk, *norm)[0], *rotation)
            out = attend_stored(q, kv_layer, metadata, config.scale, window, cap, q_sink, layer.sink_logits).flatten(1)
        elif isinstance(metadata, StoredMetadata):
            q = rotary_store_quantised(qk, v, *rotation, metadata.layer, metadata.slots, norm)
            out = attend_as_stored(q, metadata, config.scale, window, cap, layer.sink_logits).flatten(1)
        else:
            assert kv_layer is not None, "of the arena"
            q = rotary_store_kv(qk, v, *rotation, kv_layer, metadata.slot_mapping, metadata.store, norm)
            out = attend_stored(q, kv_layer, metadata, config.scale, window, cap, q_sink, layer.sink_logits).flatten(1)
        if self.watch is not None:
            self.watch(index, q, out)
        return weigh_by_sigmoid(out, qkv.flatten(1)[:, num_stored * config.head_dim :]) if config.has_output_gate else out


def _pick(of_tokens: torch.Tensor | None, rows: torch.Tensor) -> torch.Tensor | None:
    return None if of_tokens is None else of_tokens.index_select(0, rows)


def _turn_nothing(rotation: Rotation) -> Rotation:
    """A rotation like it that leaves all as it is."""
    return torch.ones_like(rotation[0]), torch.zeros_like(rotation[1])


def _make_gate(config: ModelConfig) -> Callable[..., torch.Tensor]:
    if config.activation == "relu2":
        return square_of_relu
    if config.activation == "clamped_swiglu":
        return partial(clamped_swiglu, alpha=config.swiglu_alpha, limit=config.swiglu_limit)
    return gelu_and_mul if config.activation == "gelu_tanh" else silu_and_mul


def _add_and_norm(
    x: torch.Tensor, norm: torch.Tensor | None, eps: float, residual: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """As rms_norm; without a norm the sum, twice."""
    if norm is not None:
        return rms_norm(x, norm, eps, residual)
    total = x if residual is None else x + residual
    return total, total
