"""A Hugging Face folder on disk: JSON files, safetensors, and the digest that names the weights.

Owns reading model folders, and the errors of models. Unpickles nothing. May import numpy, torch, safetensors
and the standard library, and nothing of the engine.
"""
