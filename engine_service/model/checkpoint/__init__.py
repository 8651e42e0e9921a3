"""A Hugging Face folder on disk, also in a hub's cache: JSON files, safetensors, and the digest that names the weights.

Owns reading model folders, where a stored tensor goes or why it is left out, and the errors of models. Unpickles nothing.
May import no other folder of the engine.
"""
