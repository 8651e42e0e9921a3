"""Calls that the documents show: those of docs/api/api-by-hand.md are the table's, and they and the README's example work."""

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.api.curl_examples import CACHE, ENGINE, EXAMPLES, Example, block
from tests.support.documents.markdown import page
from tests.support.processes.services import Services, environment, free_ports, services_up, short_folder

PAGE = Path(__file__).parents[2] / "docs" / "api" / "api-by-hand.md"


@pytest.fixture(scope="module")
def services() -> Iterator[Services]:
    with short_folder() as folder, services_up(folder, *free_ports()) as running:
        yield running


def test_every_buf_curl_line_works_as_it_is_written(services: Services, tmp_path: Path) -> None:
    assert shutil.which("buf"), "buf, of the development environment, must be on the PATH"
    lines = [example.buf_curl() for example in EXAMPLES]
    # The answer of the line that keeps the session is not shown.
    marks = [f"{line}\necho '=== {number}'" for number, line in enumerate(lines)]
    for number, example in enumerate(EXAMPLES):
        if example.to_file:  # it goes on in the background; the lines behind it are to find it at work
            marks[number] += f"\nuntil [ -s {example.to_file} ]; do kill -0 $!; done"
    script = "\n".join([*marks, "wait"]).replace(CACHE, services.cache).replace(ENGINE, services.engine)
    done = subprocess.run(
        ["bash", "-e", "-o", "pipefail", "-c", script], cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr + services.log_path.read_text()
    answers: dict[str, str] = {}
    rest = done.stdout
    for number, example in enumerate(EXAMPLES):
        answers[example.method], _, rest = rest.partition(f"=== {number}\n")
    sequence = json.loads(answers["GetSequence"])["sequence"]
    assert (sequence["numCommittedTokens"], sequence["tokenIds"]) == (6, [11, 12, 13, 14, 15, 16])
    assert len(sequence["blockTable"]) == 2
    explained = json.loads(answers["ExplainMatch"])
    assert (explained["numMatchedTokens"], explained["end"]) == (4, "MATCH_END_NEVER_STORED")
    assert json.loads(answers["PinPrefix"])["numPinnedTokens"] == 4
    assert '"EVENT_KIND_SNAPSHOT_END"' in (tmp_path / "events.json").read_text()
    pools = json.loads(answers["GetStats"])["pools"]
    assert [pool["numCachedBlocks"] for pool in pools if pool["pool"]["spec"]["modelId"] == "curl-example"] == [1]
    assert json.loads(answers["GetModel"])["vocabSize"] > 0
    assert '"usage"' in answers["Generate"]


def test_the_five_lines_of_the_readme_run(services: Services) -> None:
    (fence,) = [fence for fence in page("README.md").fences() if fence.language == "python"]
    assert len([line for line in fence.body.splitlines() if line]) <= 5
    own = f"EngineClient({services.engine!r})"
    program = fence.body.replace("EngineClient()", own)
    assert own in program
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=environment(services.log_path.parent),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


def test_the_page_shows_exactly_these_lines() -> None:
    text = PAGE.read_text()
    for render in (Example.grpcurl, Example.buf_curl):
        assert block(render) in text, "paste what `python tests/api/curl_examples.py` prints"
    shown = [line for line in text.splitlines() if line.lstrip("S=$(").startswith(("grpcurl -", "buf curl "))]
    expected = [render(example) for render in (Example.grpcurl, Example.buf_curl) for example in EXAMPLES]
    assert sorted(shown) == sorted(expected)
