"""The demo model: a small Llama, its tokenizer, and the script that trained them.

Owns the demo model's files. It is an ordinary Hugging Face model folder (config.json, model.safetensors, tokenizer.json)
that also holds three modules: `corpus` says which text is trained on and which is held out, `train` makes the weights,
`evaluate` measures them. Serving needs none of the three: it reads the folder like any other. May import the model and the
loader, in the script that trains.
"""

from pathlib import Path

DEMO_MODEL_DIR = Path(__file__).resolve().parent
