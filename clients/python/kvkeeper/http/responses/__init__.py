"""What a model's text says: its thought, its answer and its calls of tools, in the form that the model has learned.

Owns the forms (forms.py), which are data: one is chosen for a model by its chat template or by name. A reader (reader.py,
calls.py, source.py) takes the text of one continuation as it comes, and returns pieces (pieces.py). Knows neither HTTP nor the
engine. May import the standard library alone.
"""

from .forms import Form, UnknownForm, choose_form
from .pieces import CallArguments, CallStart, Content, Piece, Reasoning
from .reader import Reader

__all__ = ["CallArguments", "CallStart", "Content", "Form", "Piece", "Reader", "Reasoning", "UnknownForm", "choose_form"]
