"""Build backend: setuptools, plus the protobuf code that is generated and never committed.

`pip install` and `python -m build` come in through the PEP 517 hooks; `make proto` runs this file. Generated modules land
beside their .proto, where both the package build and a checkout on the import path find them. The runtime's descriptors have no
comments, so those of fields land there too: the services' metrics are explained by them.
"""

import sys
import tempfile
from pathlib import Path

from setuptools import build_meta as _setuptools
from setuptools.build_meta import (  # noqa: F401  the hooks that need nothing generated
    get_requires_for_build_sdist,
    get_requires_for_build_wheel,
)

ROOT = Path(__file__).resolve().parent


def generate() -> None:
    """Write *_pb2.py, *_pb2.pyi, *_pb2_grpc.py, *_pb2_comments.py beside each .proto. Raises RuntimeError if protoc fails."""
    from grpc_tools import protoc  # only here: metadata hooks run before build requirements are complete

    sources = sorted(str(path.relative_to(ROOT)) for path in ROOT.rglob("*.proto"))
    with tempfile.TemporaryDirectory() as folder:
        described = Path(folder) / "descriptors"
        outputs = [f"--{kind}_out={ROOT}" for kind in ("python", "pyi", "grpc_python")]
        args = ["protoc", f"-I{ROOT}", *outputs, f"--descriptor_set_out={described}", "--include_source_info", *sources]
        if protoc.main(args) != 0:
            raise RuntimeError(f"protoc failed on {', '.join(sources)}")
        _write_comments(described.read_bytes())


def _write_comments(descriptors: bytes) -> None:
    """COMMENTS of each .proto: "Message.field" to the comment above the field, as one line."""
    from google.protobuf.descriptor_pb2 import FileDescriptorSet

    for file in FileDescriptorSet.FromString(descriptors).file:
        comments: dict[str, str] = {}
        for location in file.source_code_info.location:
            if len(location.path) == 4 and (location.path[0], location.path[2]) == (4, 2):  # a field of a message
                message = file.message_type[location.path[1]]
                name = f"{message.name}.{message.field[location.path[3]].name}"
                comments[name] = " ".join(location.leading_comments.split())
        lines = [f"    {name!r}: {text!r},\n" for name, text in comments.items()]
        header = f'"""Comments of the fields in {file.name}. Generated."""\n\nCOMMENTS = {{\n'
        (ROOT / file.name.replace(".proto", "_pb2_comments.py")).write_text(header + "".join(lines) + "}\n")


def build_wheel(wheel_directory, config_settings=None, metadata_directory=None):  # type: ignore[no-untyped-def]
    generate()
    return _setuptools.build_wheel(wheel_directory, config_settings, metadata_directory)


def build_editable(wheel_directory, config_settings=None, metadata_directory=None):  # type: ignore[no-untyped-def]
    generate()
    return _setuptools.build_editable(wheel_directory, config_settings, metadata_directory)


def build_sdist(sdist_directory, config_settings=None):  # type: ignore[no-untyped-def]
    generate()
    return _setuptools.build_sdist(sdist_directory, config_settings)


prepare_metadata_for_build_wheel = _setuptools.prepare_metadata_for_build_wheel
prepare_metadata_for_build_editable = _setuptools.prepare_metadata_for_build_editable
get_requires_for_build_editable = _setuptools.get_requires_for_build_editable

if __name__ == "__main__":
    generate()
    sys.exit(0)
