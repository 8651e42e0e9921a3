"""The demo model's text: the running interpreter's standard library, split into training and held-out modules.

Owns the split and nothing else. Rules: a held-out module and the tests of a held-out module are never trained on;
generated tables and what does not parse as Python are left out; the order is the sorted order of paths, so that
two runs on one interpreter see the same text. Knows no tokenizer and no model.
"""

import ast
import sysconfig
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

HELD_OUT_MODULES = (
    "argparse",
    "calendar",
    "configparser",
    "contextlib",
    "csv",
    "dataclasses",
    "fractions",
    "gettext",
    "graphlib",
    "gzip",
    "heapq",
    "queue",
    "sched",
    "shelve",
    "shlex",
    "statistics",
    "textwrap",
)
"""Single-file modules of Python 3.11 and later: old and new ones, with much and with little documentation."""

# Installed packages, generated text, build configuration (it holds a machine's own paths).
_EXCLUDED_PARTS = ("site-packages", "dist-packages", "pydoc_data", "_sysconfigdata", "config-")
_TABLE_MARKS = ("decoding_table = (", "decoding_map = ", "### Decoding Map")
_MAX_FILE_LEN = 400_000  # bytes; only generated files are larger
_TEST_PARTS = frozenset({"test", "tests", "idle_test", "testmock"})


@dataclass(frozen=True, slots=True)
class Module:
    """One source file: its path relative to the library, with slashes, and its text."""

    path: str
    text: str

    @property
    def is_test(self) -> bool:
        return not _TEST_PARTS.isdisjoint(PurePosixPath(self.path).parts)


def stdlib_dir() -> Path:
    """The running interpreter's standard library."""
    return Path(sysconfig.get_path("stdlib"))


def held_out_modules(stdlib: Path | None = None) -> list[Module]:
    """The held-out modules that this library has, in the order of HELD_OUT_MODULES; absent ones are skipped."""
    root = stdlib or stdlib_dir()
    paths = (root / f"{name}.py" for name in HELD_OUT_MODULES)
    return [Module(path.name, path.read_text(encoding="utf-8")) for path in paths if path.is_file()]


def training_modules(stdlib: Path | None = None) -> list[Module]:
    """Every other module of the library, its own tests included."""
    return list(_iter_training_modules(stdlib or stdlib_dir()))


def _iter_training_modules(root: Path) -> Iterator[Module]:
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        if _is_excluded(relative) or _is_held_out(relative) or path.stat().st_size > _MAX_FILE_LEN:
            continue
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        if text.strip() and not any(mark in text for mark in _TABLE_MARKS) and _parses(text):
            yield Module(relative.as_posix(), text)


def _is_excluded(relative: Path) -> bool:
    return any(part.startswith(_EXCLUDED_PARTS) for part in relative.parts)


def _is_held_out(relative: Path) -> bool:
    """Whether the path is a held-out module (at the top of the library) or, anywhere, a test of one."""
    if len(relative.parts) == 1:
        return relative.stem in HELD_OUT_MODULES
    names = [f"{Path(part).stem}_" for part in relative.parts]
    return any(name.startswith(f"test_{module}_") for name in names for module in HELD_OUT_MODULES)


def _parses(text: str) -> bool:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # test data is full of invalid escapes
        try:
            ast.parse(text)
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            return False
    return True
