"""Errors of models and their folders. Each says what is wrong and carries the data that its handler needs."""

from collections.abc import Collection


class ModelError(Exception):
    """Something is wrong with a model folder: the base of these errors."""


class ModelFileMissingError(ModelError):
    """The folder, or a file that it must hold, is not there."""

    def __init__(self, what: str) -> None:
        super().__init__(f"{what} does not exist")
        self.what = what


class ModelConfigError(ModelError):
    """A JSON file of the model is malformed, or a value in it is missing or impossible."""

    def __init__(self, file: str, problem: str) -> None:
        super().__init__(f"{file}: {problem}")
        self.file = file
        self.problem = problem


class UnsupportedModelError(ModelError):
    """The model is fine, but it needs something that is not built here."""

    def __init__(self, feature: str, found: object, supported: str, why: str = "") -> None:
        """why: what it is about this model; empty: what is found says it."""
        super().__init__(f"{feature} {found!r} is not supported{why and ': '}{why}; supported: {supported}")
        self.feature = feature
        self.found = found
        self.supported = supported


class WeightsError(ModelError):
    """A weight file is damaged, or a tensor in it is missing, unexpected or of another shape."""

    def __init__(self, where: str, problem: str) -> None:
        super().__init__(f"{where}: {problem}")
        self.where = where
        self.problem = problem


class TokenizerError(ModelError):
    """The tokenizer's files cannot be used, or a chat template refuses its messages."""


class NoDeviceError(Exception):
    """The machine, or the installed torch, has no such device; no fault of the model."""

    def __init__(self, device: str, count: int) -> None:
        super().__init__(f"torch sees {f'only {count}' if count else 'no'} CUDA device{'s' if count > 1 else ''} here")
        self.device = device


def name_first(names: Collection[str]) -> str:
    """The first of some tensors by name, and how many others there are."""
    others = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return f"{min(names)}{others}"
