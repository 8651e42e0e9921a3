"""The demo model as a GGUF file, with its own vocabulary and a chat template."""

import json
from functools import partial
from pathlib import Path

import gguf

from kvkeeper.engine_service.model.demo_model import DEMO_MODEL_DIR
from tests.benchmarks.peers.write_gguf import write

CHAT_TEMPLATE = "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"


def write_demo_gguf(file: Path, kind: str, split: str = "smollm", *, begins: bool = False) -> Path:
    """kind: of gguf's, F32 or Q8_0, say. split: how text is split, as gguf names it. begins: with a token at each start."""
    write(str(DEMO_MODEL_DIR), kind, str(file), partial(_add_tokenizer, split, begins))
    return file


def _add_tokenizer(split: str, begins: bool, writer: gguf.GGUFWriter, config: dict) -> None:
    model = json.loads((DEMO_MODEL_DIR / "tokenizer.json").read_text())["model"]
    names = sorted(model["vocab"], key=model["vocab"].get)
    kinds = [gguf.TokenType.NORMAL] * len(names)
    kinds[config["eos_token_id"]] = gguf.TokenType.CONTROL
    writer.add_vocab_size(len(names))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(split)
    writer.add_add_bos_token(begins)
    writer.add_token_list(names)
    writer.add_token_types(kinds)
    writer.add_token_merges([merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]])
    writer.add_chat_template(CHAT_TEMPLATE)
