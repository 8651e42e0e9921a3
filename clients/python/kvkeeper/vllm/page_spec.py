"""The KV spec of a vLLM worker: one opaque page for each block, named by a digest of all that its bytes depend on.

Two workers share blocks exactly where the digests are equal: the same model, weights and adapters of the configuration,
element types, shapes in memory, block size, ranks and version of vLLM. A fact too many costs sharing; a fact too few would
cost right answers.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from kvkeeper.cache.v1 import cache_service_pb2 as pb
from kvkeeper.vllm.settings import WrongSettings

_FORMAT = 1  # of the page: parts one after the other, each in logical order
_ALIGNMENT = 16
_MOST_TEXT = 256


@dataclass(frozen=True, slots=True)
class Part:
    """One tensor's share of a page. shape: of one block, as the attention backend sees it; num_bytes: all of it."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Facts:
    """What the K and V of a worker depend on. config: the model's, as JSON. ranks: name to (rank, number of ranks)."""

    model: str
    revision: str
    config: str
    dtype: str
    cache_dtype: str
    backend: str
    block_size: int
    vllm_version: str
    ranks: Mapping[str, tuple[int, int]]
    parts: Sequence[Part]


def page_offsets(parts: Sequence[Part]) -> tuple[list[int], int]:
    """Where each part begins in a page, and the page's bytes."""
    offsets, end = [], 0
    for part in parts:
        offsets.append(end)
        end += -(-part.num_bytes // _ALIGNMENT) * _ALIGNMENT
    return offsets, end


def make_spec(facts: Facts) -> pb.KvSpec:
    """The spec under which the worker's pages are shared."""
    text = json.dumps({"format": _FORMAT, **asdict(facts)}, sort_keys=True, separators=(",", ":"))
    return pb.KvSpec(
        model_id=f"vllm {Path(facts.model).name}"[:_MOST_TEXT],  # for people; what counts is in the digest
        revision=facts.revision[:_MOST_TEXT],
        block_size=facts.block_size,
        layout=pb.KV_LAYOUT_OPAQUE,
        page=pb.PageLayout(page_bytes=page_offsets(facts.parts)[1], digest=hashlib.sha256(text.encode()).hexdigest()),
        compute_dtype=facts.dtype[:32],
    )


def find_revision(model: str, commit: str | None, given: str) -> str:
    """What names the weights: what the user gave, the commit of a model hub, or the files of a folder.

    A folder is known by the names, sizes and times of its files: reading all weights would take as long as loading them. Raises
    WrongSettings where nothing names them exactly.
    """
    if given:
        return given
    if commit:
        return commit
    folder = Path(model)
    if not folder.is_dir():
        raise WrongSettings('the weights have no exact revision: name one in kv_connector_extra_config, "revision": "..."')
    found = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            status = path.stat()
            found.update(f"{path.relative_to(folder)}\0{status.st_size}\0{status.st_mtime_ns}\0".encode())
    return found.hexdigest()
