"""Description: what an index file says of its pool, as JSON.

A text that a run of this service cannot have written is refused: each value has a range, and the sizes fit each other.
"""

import json
import re
from dataclasses import asdict, dataclass

from ...core.values.kv_spec import ALIGNMENT, HOST_BITS, KvSpec, LayerGroup
from ..arena import Place
from ..private_file import FileRefused

_MOST_BLOCKS = 1 << 24
_COUNT_FIELDS = ("key", "arena", "num_blocks", "num_bytes")
_PLACE = re.compile(r"[0-9a-f]{32} [0-9a-f]{16}")
_ELEMENT_COUNTS = ("num_layers", "num_kv_heads", "head_dim", "item_bytes")  # all 0 of opaque pages


@dataclass(frozen=True, slots=True)
class Description:
    """What an index file says of its pool, or of its host tier.

    arena: the inode of the arena's file. pool: of a host tier, the key of its pool's index; else 0. device, held: the place of
    an arena that is not in its file.
    """

    key: int
    arena: int
    num_blocks: int
    num_bytes: int
    spec: KvSpec
    pool: int = 0
    device: str = ""
    held: str = ""

    @property
    def block_bytes(self) -> int:
        """The size of one block in the tier that the index belongs to."""
        return self.spec.stored_bytes if self.pool else self.spec.block_bytes

    @property
    def place(self) -> Place:
        return Place(self.device, self.held)

    def encode(self) -> bytes:
        fields = {**asdict(self), "spec": {**asdict(self.spec), "key": self.spec.key.hex()}}
        for name in ("scaled_bits", "host_kv_dtype"):
            if not fields["spec"][name]:
                del fields["spec"][name]
        for group in fields["spec"]["groups"]:
            for name in ("state_bytes", "checkpoint_blocks", "num_kv_heads", "head_dim", "page_bytes"):
                if not group[name]:
                    del group[name]
        if not self.spec.groups:  # as before there were groups
            del fields["spec"]["groups"]
        if self.place == Place():  # as before there were other places
            del fields["device"], fields["held"]
        return json.dumps(fields).encode()

    @classmethod
    def decode(cls, text: bytes) -> "Description":
        """Raises FileRefused."""
        try:
            fields = json.loads(text)
            spec = fields.pop("spec")
            groups = tuple(LayerGroup(tuple(each.pop("layers")), **each) for each in spec.pop("groups", ()))
            decoded = cls(**fields, spec=KvSpec(**{**spec, "key": bytes.fromhex(spec["key"]), "groups": groups}))
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            raise FileRefused("its description cannot be read") from None
        counts = [getattr(decoded, name) for name in _COUNT_FIELDS]
        counts += _list_counts(decoded.spec) + ([decoded.pool] if decoded.pool != 0 else [])
        texts = decoded.spec.model_id, decoded.spec.element_type, decoded.spec.host_kv_dtype, decoded.device, decoded.held
        if not all(type(count) is int and 0 < count < 1 << 63 for count in counts) or any(
            type(text) is not str for text in texts
        ):
            raise FileRefused("its description has a value out of range")
        if decoded.spec.groups and not _are_groups(decoded.spec):
            raise FileRefused("its description has groups that are none of its layers")
        if decoded.spec.host_kv_dtype and not (decoded.pool and _is_packed(decoded.spec)):
            raise FileRefused("its description names a format that its blocks cannot be kept in")
        if decoded.place != Place() and _PLACE.fullmatch(f"{decoded.device} {decoded.held}") is None:
            raise FileRefused("its description names no place")
        if decoded.num_blocks > _MOST_BLOCKS or decoded.num_blocks * decoded.block_bytes > decoded.num_bytes:
            raise FileRefused("its description has sizes that do not fit each other")
        return decoded


def _is_packed(spec: KvSpec) -> bool:
    return spec.host_kv_dtype in HOST_BITS and spec.stored_as(spec.host_kv_dtype) == spec


def _are_groups(spec: KvSpec) -> bool:
    """Whether each layer is in one group, and the first group reads all tokens."""
    layers = [layer for group in spec.groups for layer in group.layers]
    numbers = [*layers, *(number for group in spec.groups for number in (group.window, group.tail_item_bytes))]
    for group in spec.groups:
        numbers += group.checkpoint_blocks, group.num_kv_heads, group.head_dim, group.page_bytes
        if type(group.state_bytes) is not int:
            return False
    if not all(type(number) is int and 0 <= number < 1 << 31 for number in numbers):
        return False
    if not all(_has_valid_shape(spec, group) and _has_valid_states(spec, group) for group in spec.groups):
        return False
    if not all(group.layers and type(group.is_chunked) is bool for group in spec.groups):
        return False
    first, *further = spec.groups
    every = list(range(spec.num_layers))
    if any(group.is_tail for group in spec.groups):  # which have each layer once more
        are_tails = not first.is_tail and all(group.is_tail is True and group.tail_item_bytes for group in further)
        if not are_tails or list(first.layers) != every:
            return False
        layers = layers[len(every) :]
    return sorted(layers) == every and not first.window and not first.state_bytes


def _has_valid_shape(spec: KvSpec, group: LayerGroup) -> bool:
    """Whether it has the spec's heads, or else heads or a page of its own."""
    heads = group.num_kv_heads, group.head_dim
    if not (any(heads) or group.page_bytes):
        return True
    is_one = all(heads) != bool(group.page_bytes) and any(heads) == all(heads) and group.page_bytes % ALIGNMENT == 0
    return is_one and not (spec.scaled_bits or spec.is_opaque or group.has_states or group.is_tail)


def _has_valid_states(spec: KvSpec, group: LayerGroup) -> bool:
    """Whether it has none, or such that fit a block and have checkpoints."""
    if bool(group.state_bytes) != bool(group.checkpoint_blocks):
        return False
    return not group.state_bytes or (0 < group.state_bytes <= spec.block_bytes and not (group.window or group.is_tail))


def _list_counts(spec: KvSpec) -> list[int]:
    """The counts that a block's bytes follow from, which must all be above 0. Raises FileRefused where others are set, too."""
    elements = [getattr(spec, name) for name in _ELEMENT_COUNTS]
    given, others = ([spec.page_bytes], elements) if spec.page_bytes != 0 else (elements, [])
    if spec.groups and not any(group.has_rows for group in spec.groups):
        given, others = elements[:1], elements[1:]
    if any(type(count) is not int or count != 0 for count in others):
        raise FileRefused("its description has both elements and opaque pages")
    return [spec.block_size, *given]
