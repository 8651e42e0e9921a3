"""All of an object's state as one hash: to see that a refusal left no trace at all, not even one that no call shows.

Follows attributes, slots, containers and arrays, and objects that refer to each other. Functions and modules have no state,
and that time has passed is no change.
"""

import hashlib
import types
from typing import Any

import numpy as np

_PLAIN = (int, float, str, bytes, bool, type(None), np.generic)
_SPARSE = 4096
_TIMES = {"now"}
_STATELESS = (types.FunctionType, types.MethodType, types.BuiltinFunctionType, types.ModuleType, type)


def state_hash(root: object) -> bytes:
    digest = hashlib.blake2b(digest_size=16)
    _feed(root, digest.update, {})
    return digest.digest()


def _feed(value: Any, update: Any, seen: dict[int, int]) -> None:
    if isinstance(value, _PLAIN):
        update(repr(value).encode())
        return
    if isinstance(value, _STATELESS):
        return
    if id(value) in seen:
        update(b"@%d" % seen[id(value)])
        return
    seen[id(value)] = len(seen)
    update(type(value).__name__.encode())
    if isinstance(value, np.ndarray):
        if value.size > _SPARSE:  # large ones are mostly empty
            places = np.flatnonzero(value)
            update(places.tobytes())
            value = value.reshape(-1)[places]
        update(value.tobytes())
        return
    if isinstance(value, dict):
        for key, item in value.items():
            _feed(key, update, seen)
            _feed(item, update, seen)
        return
    if isinstance(value, (set, frozenset)):
        value = sorted(value, key=repr)
    if hasattr(value, "__iter__") and not isinstance(value, types.GeneratorType):
        try:
            for item in list(value):
                _feed(item, update, seen)
        except TypeError:
            pass
    for name in _attributes(value):
        if name not in _TIMES and hasattr(value, name):
            _feed(getattr(value, name), update, seen)


def _attributes(value: object) -> list[str]:
    names = list(getattr(value, "__dict__", {}))
    for cls in type(value).__mro__:
        slots = cls.__dict__.get("__slots__", ())
        names += [slots] if isinstance(slots, str) else slots
    return names
