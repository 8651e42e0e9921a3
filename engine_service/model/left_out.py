"""list_left_out: the tensors of a checkpoint that a model of this config does not read. Needs no torch."""

from collections.abc import Collection

from .checkpoint.text_part import other_part, text_name
from .checkpoint.unneeded import unneeded
from .config import ModelConfig
from .families.table import FAMILIES


def list_left_out(names: Collection[str], config: ModelConfig) -> dict[str, str]:
    """Names as they are stored, each with the reason."""
    family, scheme = FAMILIES[config.family], config.scheme
    own = {name: text_name(name) for name in names}
    found = unneeded(
        own.values(),
        num_layers=config.num_layers,
        num_kv_layers=config.num_kv_layers,
        has_later_layers=family.ignores_later_layers,
        of_further_tokens=family.ignores,
        part_of=None if scheme is None else lambda name: scheme.split_name(name)[1],
    )
    left_out = {name: found[own_name] for name, own_name in own.items() if own_name in found}
    return left_out | others_left_out([name for name in names if name not in left_out], config.wrapper)


def others_left_out(names: Collection[str], wrapper: str) -> dict[str, str]:
    """Stored names of other parts than the text model of a checkpoint of this type, with the reason; "": there are none."""
    if not wrapper:
        return {}
    parts = {name: other_part(name) for name in names}
    return {name: f"is of {part}, and the text part of {wrapper} is served" for name, part in parts.items() if part}
