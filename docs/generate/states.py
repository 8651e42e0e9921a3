"""docs/inside/states.md: the states of a sequence in each service, and of a request between two engines.

They are drawn from the tables of transitions that the services check.
"""

from collections.abc import Collection, Mapping
from enum import Enum
from importlib import import_module
from importlib.util import find_spec

from docs.generate.markdown import head

_INTRO = """What a sequence or a request can be, and what takes it from one state to the next. Any other change of a state is a
defect."""
_TABLES = {
    "A sequence in the cache service": "kvkeeper.cache_service.core.sequences.transitions",
    "A sequence in the engine's scheduler": "kvkeeper.engine_service.values.request",
    "A request that changes its engine": "kvkeeper.engine_service.movement.movement",
}
_BORN = {
    "kvkeeper.engine_service.values.request": ("NEW",),
    "kvkeeper.engine_service.movement.movement": ("RUNNING",),
}  # states that others lead to as well
_NO_SEQUENCE = ("FREE_SLOT", "NONE", "GONE")  # states that stand for no sequence: drawn as the beginning and the end


def page() -> str:
    lines = head("States of a sequence", _INTRO)
    for title, module in _TABLES.items():
        if find_spec(module):
            lines += [f"## {title}", "", *picture(import_module(module).TRANSITIONS, _BORN.get(module, ())), ""]
    return "\n".join(lines).rstrip() + "\n"


def picture(transitions: Mapping[tuple[Enum, Enum], str], born: Collection[str] = ()) -> list[str]:
    """A state diagram in Mermaid. born: names of states that a sequence can begin in, beside those that no other leads to."""
    arrows = [f"    {_name(start)} --> {_name(end)}: {_label(cause)}" for (start, end), cause in transitions.items()]
    starts, ends = ({state.name: None for state in column} for column in zip(*transitions, strict=True))
    first = [f"    [*] --> {name}" for name in starts if name in born or name not in [*ends, *_NO_SEQUENCE]]
    last = [f"    {name} --> [*]" for name in ends if name not in [*starts, *_NO_SEQUENCE]]
    return ["```mermaid", "stateDiagram-v2", *first, *arrows, *last, "```"]


def _name(state: Enum) -> str:
    return "[*]" if state.name in _NO_SEQUENCE else state.name


def _label(text: str) -> str:
    """Colons and semicolons end a label in Mermaid."""
    return text.replace(":", ",").replace(";", ",")
