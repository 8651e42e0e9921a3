"""The README and the pages of docs/ as tests read them: fences, prose, links, anchors, paths and code in backticks.

Owns how a page is taken apart; what has to hold of the parts is said in tests/packaging.
"""

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_SPAN = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")


@dataclass(frozen=True, slots=True)
class Fence:
    """One block of code: its language, and what is in it."""

    page: str
    language: str
    body: str


@dataclass(frozen=True, slots=True)
class Page:
    """One Markdown file. name: its path below the root."""

    name: str
    text: str

    @property
    def folder(self) -> Path:
        return (ROOT / self.name).parent

    @property
    def prose(self) -> str:
        return _FENCE.sub("", self.text)

    def fences(self) -> list[Fence]:
        return [Fence(self.name, language, body) for language, body in _FENCE.findall(self.text)]

    def links(self) -> list[str]:
        """Targets of links and pictures that stay in the repository."""
        return re.findall(r"\]\((?!https?:)([^)\s]+)\)", _SPAN.sub("", self.prose))

    def spans(self) -> list[str]:
        return _SPAN.findall(self.prose)

    def anchors(self) -> set[str]:
        """What GitHub makes of the headings."""
        found: set[str] = set()
        for heading in re.findall(r"^#+ (.+)$", self.prose, re.MULTILINE):
            plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).strip().lower()
            slug = re.sub(r"[^\w\- ]", "", plain).replace(" ", "-")
            number = 0
            while (name := f"{slug}-{number}" if number else slug) in found:
                number += 1
            found.add(name)
        return found

    def table(self, heading: str) -> list[list[str]]:
        """Cells of the rows of the first table below a heading, without the table's own head."""
        section = re.split(rf"^#+ {re.escape(heading)}$", self.text, flags=re.MULTILINE)[1]
        section = re.split(r"^#+ ", section, flags=re.MULTILINE)[0]
        rows = [line for line in section.splitlines() if line.startswith("|")]
        return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows[2:]]


def pages() -> list[Page]:
    """The README and every page of docs/."""
    files = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    return [Page(str(file.relative_to(ROOT)), file.read_text()) for file in files]


def page(name: str) -> Page:
    return Page(name, (ROOT / name).read_text())


def commands(body: str) -> Iterator[str]:
    """Each command of a shell fence on one line, also where it is written over several."""
    for line in body.replace("\\\n", " ").splitlines():
        if line.strip() and not line.startswith("#"):
            yield line


def definitions(path: Path) -> set[str]:
    """Names and Class.method names that a module defines."""
    names: set[str] = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            names.add(node.name)
        if isinstance(node, ast.ClassDef):
            inner = (part for part in node.body if isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef))
            names.update(f"{node.name}.{part.name}" for part in inner)
    return names
