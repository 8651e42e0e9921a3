"""Trains the demo model: a tokenizer and a Llama of at most 4 M parameters, on Python's standard library.

Run by hand, once (`python -m tests.support.models.demo_train --minutes 45`), never in CI. Its outputs are committed, in
engine_service/model/demo_model. Owns the shape, the tokenizer and the recipe; `demo_corpus` owns the text, `demo_evaluate`
the measure. Rules: the budget is wall-clock time and the schedule is a function of the part of it that is used, so that an
interrupted run goes on from its checkpoint with the time it has left; nothing is pickled, checkpoints included. The held-out
bits per byte and zlib's are printed at the end; the exit status is not 0 if the bar is missed.
"""

import argparse
import json
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import repeat
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.nn import functional
from tqdm import tqdm

from kvkeeper.engine_service.model.demo_model import DEMO_MODEL_DIR
from tests.support.models.demo_corpus import Module, held_out_modules, training_modules
from tests.support.models.demo_evaluate import evaluate, load

if TYPE_CHECKING:  # a development dependency: serving the model does not need it
    from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

END_OF_TEXT = "<|endoftext|>"
VOCAB_SIZE = 4096
MAX_NUM_PARAMETERS = 4_000_000
MAX_MODEL_LEN = 2048

# What one token may span, first match wins. Line breaks take the next line's indentation with them, and a word takes
# the one character before it, so that `\n\n        ` and `.append` and `_tokens` can each be one token.
_TOKEN_PATTERN = (
    r"(?:[^\S\n]*\n)+[ \t]*"  # line breaks, with trailing space before them and indentation after them
    r"|[^\s\p{L}\p{N}]?\p{L}+| \p{L}+"  # word
    r"|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+"  # operators and punctuation
    r"|\s+(?!\S)|\s+"  # other space, less the one character that the next word takes
)


@dataclass(frozen=True, slots=True)
class Recipe:
    """How the model is trained. Lengths in tokens, learning rates at their peak."""

    minutes: float = 45.0
    batch_len: int = 8192  # tokens per optimizer step, whatever the window
    short_window_len: int = 512
    long_window_len: int = MAX_MODEL_LEN
    long_window_from: float = 0.75  # part of the budget after which windows are long
    warmup_until: float = 0.02
    decay_from: float = 0.4
    muon_lr: float = 0.01  # matrices of the layers
    adam_lr: float = 0.003  # embedding and norms
    weight_decay: float = 0.05
    library_weight: int = 2  # the library itself is seen this many times as often as its tests
    checkpoint_every_s: float = 300.0
    seed: int = 1

    def lr_scale(self, part: float) -> float:
        """Factor on both learning rates when `part` of the budget is used: up, flat, down to 0."""
        if part < self.warmup_until:
            return max(part / self.warmup_until, 0.01)
        return min(1.0, max(0.0, 1.0 - part) / (1.0 - self.decay_from))

    def window_len(self, part: float) -> int:
        return self.short_window_len if part < self.long_window_from else self.long_window_len


def train_tokenizer(texts: Iterable[str]) -> Tokenizer:
    """Byte-level BPE: all 256 bytes are in the vocabulary, so every text survives encode and decode unchanged."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_TOKEN_PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=True,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def wrap_tokenizer(tokenizer_file: Path) -> "PreTrainedTokenizerFast":
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_file(str(tokenizer_file)),
        bos_token=END_OF_TEXT,
        eos_token=END_OF_TEXT,
        model_max_length=MAX_MODEL_LEN,
        clean_up_tokenization_spaces=False,
    )


def build_model(end_of_text_id: int) -> "LlamaForCausalLM":
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=256,
        num_hidden_layers=4,
        intermediate_size=704,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=MAX_MODEL_LEN,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        tie_word_embeddings=True,
        bos_token_id=end_of_text_id,
        eos_token_id=end_of_text_id,
    )
    model = LlamaForCausalLM(config)
    num_parameters = model.num_parameters()
    assert num_parameters <= MAX_NUM_PARAMETERS, num_parameters
    return model


def build_optimizers(model: "LlamaForCausalLM", recipe: Recipe) -> list[torch.optim.Optimizer]:
    """Muon (Jordan et al., 2024) for the layers' matrices, AdamW for the embedding and the norms."""
    matrices = [p for p in model.model.layers.parameters() if p.ndim == 2]
    matrix_ids = {id(p) for p in matrices}
    others = [p for p in model.parameters() if id(p) not in matrix_ids]
    muon = torch.optim.Muon(matrices, lr=recipe.muon_lr, weight_decay=recipe.weight_decay)
    adamw = torch.optim.AdamW(others, lr=recipe.adam_lr, betas=(0.9, 0.95), weight_decay=0.0)
    return [muon, adamw]


def encode_modules(modules: list[Module], tokenizer: "PreTrainedTokenizerFast", recipe: Recipe) -> list[np.ndarray]:
    """Each module's tokens, from its `<|endoftext|>` on; a library module appears `library_weight` times."""
    encoded: list[np.ndarray] = []
    for module in tqdm(modules, desc="encode", unit="module"):
        token_ids = tokenizer.encode(module.text, add_special_tokens=False, verbose=False)
        array = np.array([tokenizer.bos_token_id, *token_ids], dtype=np.int32)
        encoded.extend(repeat(array, 1 if module.is_test else recipe.library_weight))
    return encoded


def iter_batches(encoded: list[np.ndarray], window_len: int, recipe: Recipe, seed: int) -> Iterator[torch.Tensor]:
    """Batches [batch_len / window_len, window_len + 1] for ever: per epoch, modules in a new order, cut in a row."""
    rng = np.random.default_rng(seed)
    num_windows = recipe.batch_len // window_len
    while True:
        stream = np.concatenate([encoded[i] for i in rng.permutation(len(encoded))])
        starts = rng.permutation(np.arange(0, len(stream) - window_len - 1, window_len))
        for batch in range(len(starts) // num_windows):
            chosen = starts[batch * num_windows : (batch + 1) * num_windows]
            yield torch.from_numpy(np.stack([stream[s : s + window_len + 1] for s in chosen])).long()


def train(model: "LlamaForCausalLM", encoded: list[np.ndarray], recipe: Recipe, checkpoint: Path, use_compile: bool) -> None:
    """Train until the budget is used up, time before an interruption included."""

    def compute_loss(batch: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(batch[:, :-1], use_cache=False).logits
        return functional.cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten())

    loss_fn = torch.compile(compute_loss, dynamic=False) if use_compile else compute_loss
    optimizers = build_optimizers(model, recipe)
    peak_lrs = [optimizer.param_groups[0]["lr"] for optimizer in optimizers]
    budget_s = recipe.minutes * 60
    step, used_s = load_checkpoint(checkpoint, model, optimizers) if checkpoint.exists() else (0, 0.0)
    saved_s = used_s
    start_s = time.monotonic() - used_s
    window_len = 0
    mean_loss: float | None = None
    model.train()
    bar = tqdm(total=round(budget_s), initial=round(used_s), desc="train", unit="s")
    while used_s < budget_s:
        part = used_s / budget_s
        if recipe.window_len(part) != window_len:
            window_len = recipe.window_len(part)
            batches = iter_batches(encoded, window_len, recipe, seed=recipe.seed + step)
        loss = loss_fn(next(batches))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer, peak_lr in zip(optimizers, peak_lrs, strict=True):
            optimizer.param_groups[0]["lr"] = peak_lr * recipe.lr_scale(part)
            optimizer.step()
            optimizer.zero_grad()
        step += 1
        used_s = time.monotonic() - start_s
        mean_loss = loss.item() if mean_loss is None else 0.98 * mean_loss + 0.02 * loss.item()
        bar.set_postfix(step=step, tokens=f"{step * recipe.batch_len / 1e6:.1f}M", loss=f"{mean_loss:.3f}")
        bar.update(round(used_s) - bar.n)
        if used_s - saved_s >= recipe.checkpoint_every_s or used_s >= budget_s:
            save_checkpoint(checkpoint, model, optimizers, step, used_s)
            saved_s = used_s
    bar.close()


def save_checkpoint(
    path: Path, model: "LlamaForCausalLM", optimizers: list[torch.optim.Optimizer], step: int, used_s: float
) -> None:
    tensors = {f"model/{name}": parameter.detach() for name, parameter in model.named_parameters()}
    for i, optimizer in enumerate(optimizers):
        for parameter_idx, state in optimizer.state_dict()["state"].items():
            tensors |= {f"optimizer/{i}/{parameter_idx}/{key}": value for key, value in state.items()}
    partial = path.with_suffix(".partial")
    save_file(tensors, partial, metadata={"step": str(step), "used_s": str(used_s)})
    partial.replace(path)


def load_checkpoint(path: Path, model: "LlamaForCausalLM", optimizers: list[torch.optim.Optimizer]) -> tuple[int, float]:
    """Restore model and optimizers in place; returns the step and the seconds used so far."""
    tensors = load_file(path)
    for name, parameter in model.named_parameters():
        parameter.data.copy_(tensors[f"model/{name}"])
    for i, optimizer in enumerate(optimizers):
        states: dict[int, dict[str, torch.Tensor]] = {}
        for name, tensor in tensors.items():
            kind, *rest = name.split("/")
            if kind == "optimizer" and int(rest[0]) == i:
                states.setdefault(int(rest[1]), {})[rest[2]] = tensor
        optimizer.load_state_dict({"state": states, "param_groups": optimizer.state_dict()["param_groups"]})
    with safe_open(path, "pt") as file:
        metadata = file.metadata()
    return int(metadata["step"]), float(metadata["used_s"])


def export(model: "LlamaForCausalLM", tokenizer: "PreTrainedTokenizerFast", folder: Path) -> None:
    """Write the Hugging Face folder, weights in fp16."""
    from transformers import GenerationConfig

    model.eval()
    model.generation_config = GenerationConfig(bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id)
    model.half().save_pretrained(folder)
    (folder / "model.safetensors").chmod(0o644)
    tokenizer.save_pretrained(folder)
    # Version 5 of transformers reads both names of its class and writes the one that older versions do not know.
    config_file = folder / "tokenizer_config.json"
    config = json.loads(config_file.read_text()) | {"tokenizer_class": "PreTrainedTokenizerFast"}
    config_file.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def main() -> None:
    default = Recipe()
    parser = argparse.ArgumentParser(description="Train the demo model on the standard library.")
    parser.add_argument("--minutes", type=float, default=default.minutes, help="wall-clock budget of the training loop")
    parser.add_argument("--threads", type=int, help="torch threads (default: all cores)")
    parser.add_argument("--seed", type=int, default=default.seed)
    parser.add_argument("--muon-lr", type=float, default=default.muon_lr)
    parser.add_argument("--adam-lr", type=float, default=default.adam_lr)
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=True, help="needs a C++ compiler")
    parser.add_argument(
        "--work-dir",
        type=Path,
        default=Path("build/demo_model"),
        help="checkpoint and tokenizer; a run goes on from what is there, remove it to start again",
    )
    parser.add_argument("--output", type=Path, default=DEMO_MODEL_DIR, help="Hugging Face folder to write")
    args = parser.parse_args()
    recipe = Recipe(minutes=args.minutes, seed=args.seed, muon_lr=args.muon_lr, adam_lr=args.adam_lr)
    if args.threads:
        torch.set_num_threads(args.threads)
    torch.manual_seed(recipe.seed)
    args.work_dir.mkdir(parents=True, exist_ok=True)

    modules = training_modules()
    print(f"{len(modules)} modules, {sum(len(module.text.encode()) for module in modules) / 1e6:.1f} MB to train on")
    tokenizer_file = args.work_dir / "tokenizer.json"
    if not tokenizer_file.exists():
        train_tokenizer(module.text for module in modules).save(str(tokenizer_file))
    tokenizer = wrap_tokenizer(tokenizer_file)
    encoded = encode_modules(modules, tokenizer, recipe)
    model = build_model(tokenizer.eos_token_id)
    print(f"{model.num_parameters():,} parameters, {sum(map(len, encoded)) / 1e6:.1f} M tokens an epoch")
    train(model, encoded, recipe, args.work_dir / "checkpoint.safetensors", args.compile)
    export(model, tokenizer, args.output)

    report = evaluate(*load(args.output), held_out_modules(), progress=True)
    print(report.as_table())
    if report.model_bits_per_byte >= report.bar:
        raise SystemExit(f"the bar is missed: {report.model_bits_per_byte:.3f} >= {report.bar:.3f} bits per byte")


if __name__ == "__main__":
    main()
