"""Mistakes that earlier systems made in their engines, each with the test that would have caught it."""

import ast
import itertools
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from kvkeeper.engine_service.values.request import SequenceState
from tests.support.worlds.scheduler_world import World, make_request, next_token, tiered

ROOT = Path(__file__).parents[3]
ENGINE = [path for path in (ROOT / "engine_service").rglob("*.py") if "demo_model" not in path.parts]
PRODUCT = ("kvkeeper",)


def wrong_guess(tokens: tuple[int, ...], index: int) -> list[int]:
    made = list(tokens)
    for _ in range(4):
        made.append((next_token(tuple(made), index) + 1) % 3)
    return made[len(tokens) :]


@pytest.mark.usefixtures("each_cache")
@pytest.mark.parametrize("block_size", [1, 2, 4])
@pytest.mark.parametrize("num_guessed", [0, 4])
def test_no_sequence_holds_more_blocks_than_its_tokens_need(block_size: int, num_guessed: int) -> None:
    """Slots of rejected guesses are used again; neither they nor a step ahead pile up."""
    world = World(block_size=block_size, guess=wrong_guess if num_guessed else lambda tokens, index: [])
    world.submit(make_request([1, 2, 0, 1, 2], 12, n=2))
    world.submit(make_request([2, 1], 9))
    seen = 0
    while world.busy:
        world.step()
        running = world.scheduler.running
        for row in running.live.tolist():
            sequence_id = int(running.sequence_ids[row])
            most = -(-(int(running.num_tokens[row]) + num_guessed) // block_size)
            assert running.num_blocks[row] <= most
            assert world.cache.num_blocks_in_table(sequence_id) == running.num_blocks[row]
            seen += 1
    assert seen > 20
    world.run()


@pytest.mark.parametrize("make_world", [World, tiered])
def test_a_preempted_sequence_computes_nothing_from_then_on(make_world: Callable[..., World]) -> None:
    """Whether it is computed again or swapped: neither it nor the sequence that is being extended is written wrongly."""
    for old_len, young_len in itertools.product(range(2, 6), repeat=2):  # now one of them finds no room first, now the other
        world = make_world(num_blocks=8, block_size=2)
        old, young = (world.submit(make_request([place] * length, 9)) for place, length in enumerate((old_len, young_len)))
        num_checked = 0
        while world.busy:
            work = world.step()
            assert len(work.rows) == len(work.sequences)
            if young.num_preemptions and young.sequences[0].state not in (SequenceState.RUNNING, SequenceState.ENDED):
                assert young.sequences[0] not in work.sequences
                num_checked += 1
        assert num_checked > 0
        assert (old.num_preemptions, young.num_preemptions) == (0, 1), "not the sequence that is being extended"
        world.run()
        world.check_outputs()


def names_of(path: Path) -> set[str]:
    """Dotted names that a module uses, such as time.time."""
    tree = ast.parse(path.read_text())
    return {ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}


def test_durations_are_of_clocks_that_never_go_back() -> None:
    used = {path.name: names_of(path) for path in ENGINE}
    assert {"time.monotonic", "time.perf_counter"} <= set().union(*used.values())
    wall = {"time.time", "time.time_ns", "datetime.now", "datetime.datetime.now"}
    # The time of day is a field of the gateway's protocol, and what chat templates may ask for.
    told = {"kv_events.py": ["time.time"], "chat_template.py": ["datetime.now"]}
    assert {name: sorted(found & wall) for name, found in used.items() if found & wall} == told


def test_the_engine_takes_no_locks() -> None:
    """One task moves the sequences; its one worker thread shares nothing with it but the work that is handed over.

    The processes of the other ranks are watched in threads, which touch no sequence: each waits for the end of a process. A
    lock decides which of several ends was the first, and one for each rank which thread reads what it said last. The first
    rank talks with the others from the thread that launches steps, and where a step has failed from the one that reads it: a
    lock keeps one exchange of messages apart from the next.
    """
    assert len(ENGINE) > 50
    found = [path for path in ENGINE if re.search(r"\bthreading\b|\bLock\(|\bSemaphore\(", path.read_text())]
    assert sorted(f"{path.parent.name}/{path.name}" for path in found) == [
        "ranks/rank_process.py",
        "ranks/ranked_runner.py",
        "ranks/team.py",
    ]


def imported_by(path: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return found


def reaches_the_product(path: Path, seen: set[Path]) -> bool:
    if path in seen:
        return False
    seen.add(path)
    imported = imported_by(path)
    if any(name.split(".")[0] in PRODUCT for name in imported):
        return True
    inner = (ROOT / (name.replace(".", "/") + ".py") for name in imported if name.startswith("tests."))
    return any(reaches_the_product(other, seen) for other in inner if other.exists())


@pytest.mark.parametrize("folder", ["unit/engine_service", "unit/kernels", "e2e"])
def test_tests_run_the_product_and_no_copy_of_it(folder: str) -> None:
    others = {"test_mistakes_table.py", "test_recorded_graphs.py"}  # a table, and a stand-in's own tests
    paths = [path for path in (ROOT / "tests" / folder).rglob("test_*.py") if path.name not in others]
    assert len(paths) > 20
    for path in paths:
        assert reaches_the_product(path, set()), path.name


def test_no_end_to_end_test_defines_what_the_product_does() -> None:
    product = {
        node.name
        for root in ("engine_service", "kernels")
        for path in (ROOT / root).rglob("*.py")
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_")
    }
    assert {"Scheduler", "Engine", "sample", "paged_attention_decode"} <= product
    for path in (ROOT / "tests" / "e2e").glob("test_*.py"):
        defined = {node.name for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
        assert defined & product == set(), f"{path.name} has its own"
