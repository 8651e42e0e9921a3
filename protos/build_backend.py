"""Build backend: setuptools, plus the protobuf code that is generated and never committed.

`pip install` and `python -m build` come in through the PEP 517 hooks; `make proto` runs this file. Generated modules land
beside their .proto, where both the package build and a checkout on the import path find them.
"""

import sys
from pathlib import Path

from setuptools import build_meta as _setuptools
from setuptools.build_meta import (  # noqa: F401  the hooks that need nothing generated
    get_requires_for_build_sdist,
    get_requires_for_build_wheel,
)

ROOT = Path(__file__).resolve().parent


def generate() -> None:
    """Write *_pb2.py, *_pb2.pyi and *_pb2_grpc.py beside each .proto. Raises RuntimeError where protoc fails."""
    from grpc_tools import protoc  # only here: metadata hooks run before build requirements are complete

    sources = sorted(str(path.relative_to(ROOT)) for path in ROOT.rglob("*.proto"))
    args = ["protoc", f"-I{ROOT}", f"--python_out={ROOT}", f"--pyi_out={ROOT}", f"--grpc_python_out={ROOT}", *sources]
    if protoc.main(args) != 0:
        raise RuntimeError(f"protoc failed on {', '.join(sources)}")


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
