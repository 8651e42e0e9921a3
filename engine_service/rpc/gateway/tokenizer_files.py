"""The files of a model's tokenizer in one archive, for a gateway that makes tokens of texts itself.

Read once, when the first gateway asks. No weights, and no other file than those that tokenizers are made of.
"""

import hashlib
import io
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

CHUNK_BYTES = 64 << 10
_NAMES = frozenset({
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "config.json",
    "generation_config.json",
    "merges.txt",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
})  # fmt: skip


@dataclass(frozen=True, slots=True)
class Archive:
    """A zip file, with the SHA-256 of its bytes in hex."""

    data: bytes
    sha256: str

    def chunks(self) -> Iterator[tuple[bytes, str]]:
        """Its bytes in order, and with the last of them the digest."""
        for start in range(0, len(self.data), CHUNK_BYTES):
            is_last = start + CHUNK_BYTES >= len(self.data)
            yield self.data[start : start + CHUNK_BYTES], self.sha256 if is_last else ""


def archive_of(folder: Path) -> Archive:
    """The archive of a model's folder; the same bytes for the same files."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        for path in sorted(folder.iterdir()):
            if path.name in _NAMES and path.is_file():
                archive.writestr(zipfile.ZipInfo(path.name), path.read_bytes(), zipfile.ZIP_DEFLATED)
    data = out.getvalue()
    return Archive(data, hashlib.sha256(data).hexdigest())
