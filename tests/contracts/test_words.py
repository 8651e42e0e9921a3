"""The words of the house: what a native writer would not say is not in documents, product code and protos.

In code, names, comments and docstrings are looked at. What is left there is counted, and the count may only shrink. Generated
pages say what the code and the protos say, and are not looked at again.
"""

import ast
import io
import re
import tokenize
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from tests.contracts.source_tree import ROOT, package_roots
from tests.support.documents.markdown import pages

# Name of the rule: (what is not written, what is written instead).
WORDS = {
    "answers": (
        r"^\s*answers\b|\banswers (?:it|them|an?|the|no|none|any|all|whether|what|each|with|for|in|as)\b|\banswers `"
        r"|\b(?:is|are|was|were|be|been|being|has|have) answered\b",
        "returns; for a service: replies, responds",
    ),
    "tell": (r"\b(?:un|fore)?(?:tells?|telling|told)\b", "return, report, notify, list, count: which it is"),
    "hang on": (r"\b(?:hangs?|hanging|hung) on\b", "depend on"),
    "lawful": (r"\b(?:un)?lawful(?:ly)?\b", "valid"),
    "elder": (r"\belders?\b", "earlier"),
    "owed": (r"\bow(?:e|es|ed|ing)\b", "reserved, left to do"),
    "whose turn": (r"\bwhose turn\b", "scheduled"),
    "at work": (r"\bat work\b", "running"),
    "go on with": (r"\b(?:go|goes|going|gone|went) on with\b", "continue"),
    "everybody": (r"\bdoes not mean everybody\b", "An empty list means nobody, not everybody."),
}
# What is counted in code alone.
OF_CODE = {
    "x_of": "a function `x_of(...)`: get_x, parse_x, make_x, find_x; _of is for properties and conversions",
    "participle": "a class named by a participle: Listener, RemoteDirectory, RequestHandover, RequestStream",
    "no sentence": "a docstring such as `Of one pool.`: a sentence, or none",
}
PARTICIPLES = {"Told", "ToldTable", "Leaving", "Streamed", "Asked", "TakesPlace"}
# What is left; it may only shrink.
MOST_IN_CODE = {
    "x_of": 1,  # one_of, a check of settings, which reads `check=one_of(...)`
}
GENERATED = {"docs/api/api.md", "docs/operate/configuration.md", "docs/inside/imports.md", "docs/inside/states.md"}
HISTORY = {"docs/CHANGELOG.md"}  # of what was, in the words of its time
_CAMEL = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")


def found_in(texts: Iterable[str]) -> Counter[str]:
    """How often each rule is broken."""
    counts: Counter[str] = Counter()
    for text in texts:
        for name, (pattern, _) in WORDS.items():
            counts[name] += len(re.findall(pattern, text, re.IGNORECASE | re.MULTILINE))
    return counts


def of_python(path: Path) -> tuple[list[str], Counter[str]]:
    """Names as words, comments and docstrings of a module; and what is counted in code alone."""
    source, counts = path.read_text(), Counter[str]()
    tokens = list(tokenize.generate_tokens(io.StringIO(source).readline))
    names = {token.string for token in tokens if token.type == tokenize.NAME}
    texts = [_CAMEL.sub(" ", name).replace("_", " ").strip() for name in sorted(names)]
    texts.append(" ".join(token.string.lstrip("# ") for token in tokens if token.type == tokenize.COMMENT))
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            is_property = any(ast.unparse(each).endswith("property") for each in node.decorator_list)
            counts["x_of"] += node.name.endswith("_of") and not is_property
        if isinstance(node, ast.ClassDef):
            counts["participle"] += node.name.lstrip("_") in PARTICIPLES
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and (
            text := ast.get_docstring(node)
        ):
            texts.append(" ".join(text.split()))
            counts["no sentence"] += re.match(r"Of\b", text) is not None
    return texts, counts


def of_proto(text: str) -> list[str]:
    """Comments, joined over their lines, and names as words."""
    comments = re.sub(r"\n\s*//", "", "\n".join(re.findall(r"^\s*//.*|//.*$", text, re.MULTILINE)))
    code = re.sub(r"//.*", "", text)
    return [comments, *(_CAMEL.sub(" ", name).replace("_", " ") for name in sorted(set(re.findall(r"\b[A-Za-z]\w+", code))))]


def documents() -> Iterator[tuple[str, str]]:
    """Name and prose of each document that is written by hand, and the comments of the deployment files."""
    for found in pages():
        if found.name not in GENERATED | HISTORY:
            yield found.name, re.sub(r"`[^`\n]+`", "`x`", found.prose)
    for path in (
        *(ROOT / "clients").glob("*/README.md"),
        *(ROOT / "deploy").rglob("*.yaml"),
        *(ROOT / "deploy").rglob("*.service"),
    ):
        if "node_modules" not in path.parts:
            yield str(path.relative_to(ROOT)), path.read_text()


@pytest.mark.parametrize(("name", "text"), list(documents()), ids=[name for name, _ in documents()])
def test_documents_say_none_of_it(name: str, text: str) -> None:
    text = re.sub(r"(?<!\n)\n(?![\n|#-])", " ", text)  # a phrase may be on two lines
    found = [
        f"{match[0].strip()!r}: {instead}" for pattern, instead in WORDS.values() for match in re.finditer(pattern, text, re.I)
    ]
    assert found == []


def test_code_says_none_of_it_but_what_is_counted() -> None:
    counts: Counter[str] = Counter()
    files = [path for root in package_roots() for path in root.rglob("*.py") if not path.is_relative_to(ROOT / "docs")]
    files += (ROOT / "protos").glob("*.py")
    assert len(files) > 300
    for path in files:
        if not path.name.endswith(("_pb2.py", "_pb2_grpc.py")):
            texts, of_code = of_python(path)
            counts += found_in(texts) + of_code
    _assert_fewer(counts, MOST_IN_CODE)


def test_protos_say_none_of_it() -> None:
    texts = [text for path in (ROOT / "protos").rglob("*.proto") for text in of_proto(path.read_text())]
    assert len(texts) > 500
    _assert_fewer(found_in(texts), {})


def _assert_fewer(counts: Counter[str], most: dict[str, int]) -> None:
    instead = {name: text for name, (_, text) in WORDS.items()} | OF_CODE
    more = {
        name: f"{count}, at most {most.get(name, 0)}; instead: {instead[name]}"
        for name, count in counts.items()
        if count > most.get(name, 0)
    }
    assert more == {}


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("Answers the number of blocks.", "answers"),
        ("The call is answered at once.", "answers"),
        ("What it was told.", "tell"),
        ("It foretells a step.", "tell"),
        ("That hangs on the lease.", "hang on"),
        ("An unlawful step.", "lawful"),
        ("It goes on with the next one.", "go on with"),
        ("Two answers came.", ""),
        ("A teller.", ""),
    ],
)
def test_each_word_is_found(text: str, rule: str) -> None:
    assert set(+found_in([text])) == ({rule} if rule else set())


def test_names_comments_and_docstrings_are_read(tmp_path: Path) -> None:
    module = tmp_path / "m.py"
    module.write_text('class Told:\n    """Of one pool."""\n\ndef size_of(told_now):\n    """Answers it."""\n    # at work\n')
    texts, of_code = of_python(module)
    assert +(found_in(texts) + of_code) == Counter(
        {"tell": 2, "answers": 1, "at work": 1, "x_of": 1, "participle": 1, "no sentence": 1}
    )
    assert +found_in(of_proto("// What it\n// was told.\nmessage ToldTable { int32 at_work = 1; }  // Owed.\n")) == Counter(
        {"tell": 2, "at work": 1, "owed": 1}
    )
