"""What a model's text says: its thought, its answer and its calls of tools, in the form that the model has learned.

Owns the forms (forms.py), which are data: one is chosen for a model by its chat template or by name. A reader (reader.py,
calls.py, source.py) takes the text of one continuation as it comes, and returns pieces (pieces.py). Knows neither HTTP nor the
engine. A form may be a model's own response template, which transformers reads (templates.py). May import the standard library
alone, and transformers there.
"""

from .forms import Form, UnknownForm, WrongTemplate, choose_form, template_form
from .pieces import CallArguments, CallStart, Content, Piece, Reader, Reasoning

__all__ = [
    "CallArguments",
    "CallStart",
    "Content",
    "Form",
    "Piece",
    "Reader",
    "Reasoning",
    "UnknownForm",
    "WrongTemplate",
    "choose_form",
    "template_form",
]
