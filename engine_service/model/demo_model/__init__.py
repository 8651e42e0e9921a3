"""The demo model: a small Llama and its tokenizer.

Owns an ordinary Hugging Face model folder (config.json, model.safetensors, tokenizer.json), so that the engine can serve
without a download. May import no other folder of the engine.
"""

from pathlib import Path

DEMO_MODEL_DIR = Path(__file__).resolve().parent
