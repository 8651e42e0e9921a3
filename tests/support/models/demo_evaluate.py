"""Bits per byte of a Hugging Face folder on the held-out modules, against `zlib -9` on the same bytes.

Owns the measure and nothing else, so that the training script and the test cannot differ in it. Rules: each module
starts from `<|endoftext|>` and an empty context; every token is scored exactly once, with at least half a window
of context where the module has that much before it; bytes are counted in UTF-8, tokens are not. The bar is the
harder of two figures: zlib on each module by itself, and on all of them in a row.
"""

import argparse
import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch.nn import functional
from tqdm import tqdm

from kvkeeper.engine_service.model.demo_model import DEMO_MODEL_DIR
from tests.support.models.demo_corpus import Module, held_out_modules

if TYPE_CHECKING:  # a development dependency: serving the model does not need it
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


@dataclass(frozen=True, slots=True)
class Score:
    """Bits per byte of one text, by the model and by zlib."""

    name: str
    num_bytes: int
    num_tokens: int
    model_bits: float
    zlib_bits: int

    @property
    def model_bits_per_byte(self) -> float:
        return self.model_bits / self.num_bytes

    @property
    def zlib_bits_per_byte(self) -> float:
        return self.zlib_bits / self.num_bytes


@dataclass(frozen=True, slots=True)
class Report:
    """The score of each module, and zlib's bits for all modules in a row."""

    scores: tuple[Score, ...]
    joined_zlib_bits: int

    @property
    def num_bytes(self) -> int:
        return sum(score.num_bytes for score in self.scores)

    @property
    def num_tokens(self) -> int:
        return sum(score.num_tokens for score in self.scores)

    @property
    def model_bits_per_byte(self) -> float:
        return sum(score.model_bits for score in self.scores) / self.num_bytes

    @property
    def zlib_per_module_bits_per_byte(self) -> float:
        return sum(score.zlib_bits for score in self.scores) / self.num_bytes

    @property
    def zlib_joined_bits_per_byte(self) -> float:
        return self.joined_zlib_bits / self.num_bytes

    @property
    def bar(self) -> float:
        return min(self.zlib_per_module_bits_per_byte, self.zlib_joined_bits_per_byte)

    def as_table(self) -> str:
        rows = [f"{'module':<18} {'bytes':>8} {'tokens':>8} {'model':>8} {'zlib -9':>8}"]
        for score in self.scores:
            counts = f"{score.name:<18} {score.num_bytes:>8} {score.num_tokens:>8}"
            rows.append(f"{counts} {score.model_bits_per_byte:>8.3f} {score.zlib_bits_per_byte:>8.3f}")
        total = f"{self.num_bytes:>8} {self.num_tokens:>8} {self.model_bits_per_byte:>8.3f}"
        rows.append(f"{'all, one by one':<18} {total} {self.zlib_per_module_bits_per_byte:>8.3f}")
        rows.append(f"{'all, in a row':<18} {total} {self.zlib_joined_bits_per_byte:>8.3f}")
        return "\n".join(rows)


def evaluate(
    model: "PreTrainedModel",
    tokenizer: "PreTrainedTokenizerBase",
    modules: Sequence[Module],
    window_len: int = 1024,
    progress: bool = False,
) -> Report:
    """Score every module. `window_len` is the most tokens the model sees at once."""
    if not modules:
        raise ValueError("no modules to evaluate")
    if not 2 <= window_len <= model.config.max_position_embeddings:
        raise ValueError(f"window_len {window_len} is not in 2..{model.config.max_position_embeddings}")
    scores = []
    for module in tqdm(modules, desc="evaluate", unit="module", disable=not progress):
        data = module.text.encode()
        token_ids = tokenizer.encode(module.text, add_special_tokens=False, verbose=False)
        bits = sum_token_bits(model, [tokenizer.bos_token_id, *token_ids], window_len)
        scores.append(Score(module.path, len(data), len(token_ids), bits, _zlib_bits(data)))
    joined = b"".join(module.text.encode() for module in modules)
    return Report(tuple(scores), _zlib_bits(joined))


@torch.inference_mode()
def sum_token_bits(model: "PreTrainedModel", token_ids: Sequence[int], window_len: int) -> float:
    """Bits the model needs for token_ids[1:], given token_ids[0]; windows overlap by half.

    | window | context (not scored again)  | scored                       |
    | first  | token 0                     | 1 .. window_len - 1          |
    | next   | the window_len/2 before     | the window_len/2 that follow |
    """
    was_training = model.training
    model.eval()
    total = 0.0
    scored_end = 1  # tokens before this index are scored
    while scored_end < len(token_ids):
        start = 0 if scored_end == 1 else scored_end - window_len // 2
        end = min(start + window_len, len(token_ids))
        window = torch.tensor(token_ids[start:end], device=model.device)  # [window]
        logits = model(window[None, :-1]).logits[0]  # [window - 1, vocab]; row i predicts window[i + 1]
        num_scored = end - scored_end
        loss = functional.cross_entropy(logits[-num_scored:].float(), window[-num_scored:], reduction="sum")
        total += loss.item()
        scored_end = end
    model.train(was_training)
    return total / math.log(2)


def load(folder: Path = DEMO_MODEL_DIR) -> "tuple[PreTrainedModel, PreTrainedTokenizerBase]":
    """The folder's model, in fp32 on the CPU, and its tokenizer. Reads safetensors only."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True, use_safetensors=True)
    return model, AutoTokenizer.from_pretrained(folder, local_files_only=True)


def _zlib_bits(data: bytes) -> int:
    return 8 * len(zlib.compress(data, level=9))


def main() -> None:
    parser = argparse.ArgumentParser(description="Bits per byte on the held-out modules, against zlib -9.")
    parser.add_argument("folder", type=Path, nargs="?", default=DEMO_MODEL_DIR)
    parser.add_argument("--stdlib", type=Path, help="another interpreter's library (default: the running one's)")
    parser.add_argument("--window-len", type=int, default=1024, metavar="TOKENS")
    args = parser.parse_args()
    model, tokenizer = load(args.folder)
    report = evaluate(model, tokenizer, held_out_modules(args.stdlib), args.window_len, progress=True)
    print(report.as_table())
    if report.model_bits_per_byte >= report.bar:
        raise SystemExit(f"the bar is missed: {report.model_bits_per_byte:.3f} >= {report.bar:.3f} bits per byte")


if __name__ == "__main__":
    main()
