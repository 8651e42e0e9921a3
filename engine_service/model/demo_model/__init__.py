"""The demo model: a small Llama, its tokenizer, and the script that trained them.

Owns an ordinary Hugging Face model folder (config.json, model.safetensors, tokenizer.json), so that the engine can serve
without a download, and three modules: `corpus` lists the text that is trained on and the text that is held out, `train` makes
the weights, `evaluate` measures them. Serving needs none of the three. May import no other folder of the engine.
"""

from pathlib import Path

DEMO_MODEL_DIR = Path(__file__).resolve().parent
