"""The check of a model that the transformers library computes: its own forward pass against the engine's, at load.

A model may do things around attention that its attention function does not show: restrict it to chunks, rotate keys by the
length of the whole sequence, take a token's place in the batch for its position. Then the engine would give other logits, and
nothing else would show it. So the library computes a short and a long random prompt in its own way, the engine's runner
computes both (in one batch, the long one in chunks, the last tokens one by one), and a model is refused where the logits
differ. The long prompt goes past every length that the config names; where the bounds below stop it short of one, the model is
served up to that length.
"""

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import structlog
import torch

from ..model.checkpoint.errors import UnsupportedModelError
from ..model.dtype_name import DtypeChoice
from ..model.transformers_model import TransformersModel, load_transformers_model
from ..values.batch import Batch, IntArray
from ..values.request import Int32Array
from .model_runner import Model, ModelRunner, make_kv_layout

log = structlog.get_logger()

_BLOCK_SIZE: Final = 16
_SHORT, _LONG, _LEAST = 13, 256, 32  # tokens; of the long prompt where the config names no length, and where bounds are tight
_NUM_DECODED: Final = 3
_NUM_COMPARED: Final = 96  # places of a prompt whose logits are compared
_NUM_CHUNKS, _MOST_CHUNK = 3, 2048
_MOST_FLOPS: Final = {"cpu": 4e12, "cuda": 1e15}  # to exceed a length: about a minute of two cores, a few seconds of a GPU
_USUAL_SHARE: Final = 1 / 4  # of them, where there is none to go past
_MOST_BYTES: Final = 1 << 30  # of scores that the library makes at once, and of our K and V

# Of a row of logits: the length of the difference by the length of the row. In 16 bits a router may send a token to another
# expert for a rounding error, and such a row says nothing; so there the median counts, of each part of a prompt.
_TOLERANCE: Final = {torch.float32: 1e-3, torch.float16: 0.02, torch.bfloat16: 0.1}


@dataclass(frozen=True, slots=True)
class _Prompt:
    """Tokens, int64 [T], and the ascending places whose logits are compared, int64 [R]."""

    tokens: IntArray
    places: IntArray


def load_checked_model(
    folder: Path, model_type: object, dtype: DtypeChoice, *, device: torch.device, progress: bool
) -> TransformersModel:
    """Load a model through transformers, and check it. Arguments and errors are those of load_transformers_model."""
    return load_transformers_model(folder, model_type, dtype, device=device, progress=progress, check=check_against_library)


def check_against_library(model: Model, network: Any, model_type: object, *, soft_cap: bool) -> int:
    """Compare `model`, which is `network` on the paged arena, with `network` itself.

    Args:
        soft_cap: scores are bent, which the library's fast attention cannot do.

    Returns:
        The length up to which nothing that the config names is unproven; model.config.max_position where all was tried.

    Raises:
        UnsupportedModelError: they differ, or the library's own pass does not work.
    """
    started = time.monotonic()
    plain = "eager" if soft_cap or not getattr(network, "_supports_sdpa", False) else "sdpa"
    num_heads = network.config.get_text_config().num_attention_heads
    named = {length for length in _lengths(network.config.to_dict()) if length < model.config.max_position}
    length = _long_length(model, network, named, num_heads if plain == "eager" else 0)
    while True:
        prompts = _random_prompts(network.config, sorted({min(_SHORT, length), length}))
        log.info("model_check_started", model_type=model_type, prompt_lens=[len(prompt.tokens) for prompt in prompts])
        try:
            theirs = _library_logits(network, plain, prompts)
            ours = _paged_logits(model, prompts)
            break
        except torch.OutOfMemoryError:
            if length <= _LEAST:
                raise
            length //= 2
        finally:
            if model.device.type == "cuda":
                torch.cuda.empty_cache()
    tolerance = _TOLERANCE[model.dtype]
    error = max(_error(a, b, strict=model.dtype is torch.float32) for a, b in zip(ours, theirs, strict=True))
    proven = min((far for far in named if far >= length), default=model.config.max_position)
    log.info(
        "model_checked",
        model_type=model_type,
        prompt_lens=[len(prompt.tokens) for prompt in prompts],
        num_rows=sum(len(prompt.places) for prompt in prompts),
        proven_len=proven,
        relative_error=float(f"{error:.2e}"),
        tolerance=tolerance,
        duration_s=round(time.monotonic() - started, 2),
    )
    if not error <= tolerance:  # not a number is refused too
        raise UnsupportedModelError(
            "model type",
            model_type,
            f"models whose logits on the paged cache are the library's own; here they differ by {error:.2g} of their size, "
            f"and {tolerance:g} is allowed in {str(model.dtype).removeprefix('torch.')}",
        )
    return proven


def _long_length(model: Model, network: Any, named: set[int], num_heads: int) -> int:
    """Tokens of the long prompt: past the greatest of the named lengths that it can go past at bearable cost.

    num_heads: of the library's attention where it makes all scores at once; 0: it does not.
    """
    config = model.config
    num_parameters = sum(parameter.numel() for parameter in network.parameters())
    wide = config.num_layers * config.head_dim * network.config.get_text_config().num_attention_heads
    kv_bytes = make_kv_layout(config, model.dtype, 1).block_bytes

    def is_bounded(length: int, most_flops: float) -> bool:
        flops = 4 * length * num_parameters + 4 * length**2 * wide  # of both passes
        num_bytes = max(3 * num_heads * length**2 * model.dtype.itemsize, kv_bytes * length)
        return flops <= most_flops and num_bytes <= _MOST_BYTES

    most_flops = _MOST_FLOPS[model.device.type]
    for far in sorted(named, reverse=True):
        length = min(max(_LONG, far + far // 4 + _BLOCK_SIZE), config.max_position)
        if is_bounded(length, most_flops):
            return length
    length = _LONG
    while length > _LEAST and not is_bounded(length, _USUAL_SHARE * most_flops):
        length -= length // 16
    return min(length, config.max_position)


def _lengths(config: Mapping[str, Any]) -> Iterator[int]:
    """Every number in the config whose name contains window, chunk or topk."""
    for key, value in config.items():
        if isinstance(value, Mapping):
            yield from _lengths(value)
        elif isinstance(value, int) and any(word in key for word in ("window", "chunk", "topk")):
            yield value


def _random_prompts(config: Any, lengths: list[int]) -> list[_Prompt]:
    """Prompts of tokens that are not padding, which some models leave out. They are the same each time."""
    text = config.get_text_config()
    generator = np.random.default_rng(0)
    prompts = []
    for length in lengths:
        tokens = generator.integers(0, text.vocab_size, length, dtype=np.int64)
        if (pad := getattr(text, "pad_token_id", None)) is not None:
            tokens[tokens == pad] = (pad + 1) % text.vocab_size
        places = np.unique(
            np.concatenate((np.linspace(0, length - 1, _NUM_COMPARED), np.arange(length - 1 - _NUM_DECODED, length)))
        )
        prompts.append(_Prompt(tokens, np.unique(places[places >= 0].astype(np.int64))))
    return prompts


@torch.inference_mode()
def _library_logits(network: Any, attention: str, prompts: list[_Prompt]) -> list[torch.Tensor]:
    """[R, vocab_size] float32 of each prompt, computed whole."""
    before = network.config._attn_implementation
    network.set_attn_implementation(attention)
    try:
        found = []
        for prompt in prompts:
            tokens, places = (torch.from_numpy(array).to(network.device) for array in (prompt.tokens, prompt.places))
            logits = network(input_ids=tokens[None], use_cache=False, logits_to_keep=places).logits[0]
            found.append((logits if len(logits) == len(places) else logits[places]).float())
        return found
    finally:
        network.set_attn_implementation(before)


def _paged_logits(model: Model, prompts: list[_Prompt]) -> list[torch.Tensor]:
    """The same as the engine computes it; the memory of K and V is this function's own."""
    layout = make_kv_layout(model.config, model.dtype, _BLOCK_SIZE)
    counts = [-(-len(prompt.tokens) // _BLOCK_SIZE) for prompt in prompts]
    blocks = np.random.default_rng(1).permutation(sum(counts)).astype(np.int32) + 1
    tables = np.zeros((len(prompts), max(counts)), np.int32)
    for table, count in zip(tables, counts, strict=True):
        table[:count], blocks = blocks[:count], blocks[count:]
    memory = torch.zeros((1 + sum(counts)) * layout.block_bytes, dtype=torch.uint8, device=model.device)
    runner = ModelRunner(model, layout.view(memory), layout)
    found: list[list[torch.Tensor]] = [[] for _ in prompts]
    done = [0] * len(prompts)
    while members := [idx for idx, prompt in enumerate(prompts) if done[idx] < len(prompt.tokens)]:
        ends = [_next_end(done[idx], len(prompts[idx].tokens)) for idx in members]
        batch = _batch(
            [prompts[idx] for idx in members], np.array([done[idx] for idx in members]), np.array(ends), tables[members]
        )
        logits = runner.forward(batch)
        assert len(logits) == len(batch.logit_rows), "as many logits as were asked for"
        for row, idx in enumerate(members):
            first, last = batch.logit_start_loc[row : row + 2]
            found[idx].append(logits[first:last].clone())  # the next step may use their memory
            done[idx] = ends[row]
    return [torch.cat(parts) for parts in found]


def _next_end(done: int, length: int) -> int:
    """Chunks of about a third, and then single tokens."""
    prefilled = max(1, length - _NUM_DECODED)
    if done >= prefilled:
        return done + 1
    return min(done + min(-(-prefilled // _NUM_CHUNKS), _MOST_CHUNK), prefilled)


def _batch(prompts: list[_Prompt], starts: IntArray, ends: IntArray, tables: Int32Array) -> Batch:
    """Tokens [starts, ends) of each prompt, with the logits of its places among them."""
    query_lens = ends - starts
    query_start_loc = np.concatenate(([0], np.cumsum(query_lens)))
    owners = np.repeat(np.arange(len(prompts)), query_lens)
    positions = np.arange(query_start_loc[-1]) - np.repeat(query_start_loc[:-1] - starts, query_lens)
    logit_rows = [
        prompt.places[(prompt.places >= start) & (prompt.places < end)] - start + first
        for prompt, start, end, first in zip(prompts, starts, ends, query_start_loc[:-1], strict=True)
    ]
    return Batch(
        token_ids=np.concatenate([prompt.tokens[start:end] for prompt, start, end in zip(prompts, starts, ends, strict=True)]),
        positions=positions,
        slot_mapping=tables[owners, positions // _BLOCK_SIZE].astype(np.int64) * _BLOCK_SIZE + positions % _BLOCK_SIZE,
        query_start_loc=query_start_loc.astype(np.int32),
        seq_lens=ends.astype(np.int32),
        block_tables=tables[:, : -(-int(ends.max()) // _BLOCK_SIZE)],
        logit_rows=np.concatenate(logit_rows),
        logit_start_loc=np.concatenate(([0], np.cumsum([len(rows) for rows in logit_rows]))).astype(np.int32),
    )


def _error(ours: torch.Tensor, theirs: torch.Tensor, *, strict: bool) -> float:
    """The error of the worst row, or of the median row of the worst part.

    The parts are two halves that are prefilled, and the decoded rows.
    """
    centred = theirs - theirs.mean(dim=1, keepdim=True)
    errors = (ours - theirs).norm(dim=1) / centred.norm(dim=1).clamp(min=1e-6)
    if strict:
        return float(errors.max())
    parts = (*errors[:-_NUM_DECODED].chunk(2), errors[-_NUM_DECODED:])
    return max(float(part.nan_to_num(torch.inf).median()) for part in parts if len(part))
