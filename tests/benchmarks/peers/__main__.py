"""`python -m tests.benchmarks.peers`: systems, kinds of numbers and workloads that flags choose; JSON lines, then the table.

Systems of one kind of numbers are all there at once, and take turns; those of another start when these have ended.
"""

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

from tqdm import tqdm

from tests.benchmarks.llama import SIZES
from tests.benchmarks.peers import environments, systems
from tests.benchmarks.peers.rounds import take_turns
from tests.benchmarks.peers.systems import KINDS, ROOT, Ended, Running, System
from tests.benchmarks.peers.table import tables
from tests.benchmarks.peers.workloads import WORKLOADS

_SYSTEMS = ("kvkeeper", "vllm", "llama.cpp")


def choose(argv: Sequence[str]) -> argparse.Namespace:
    """Ends the process with a sentence where a name is unknown."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.peers", description=__doc__)
    parser.add_argument("--systems", type=_names(_SYSTEMS), default=_SYSTEMS, help=", ".join(_SYSTEMS))
    parser.add_argument("--dtypes", type=_names(KINDS), default=KINDS, help=f"{', '.join(KINDS)}; int8 is Q8_0 of llama.cpp's")
    parser.add_argument("--workloads", type=_names(WORKLOADS), default=tuple(WORKLOADS), help=", ".join(WORKLOADS))
    parser.add_argument("--rounds", type=int, default=3, help="that count; one goes before them")
    parser.add_argument("--model", choices=SIZES, default=SIZES[0], help="parameters of the Llama")
    parser.add_argument("--tree", type=Path, help="another checkout with a virtual environment, measured as one more system")
    parser.add_argument("--environments", type=Path, default=ROOT / "build", help="where the peers and models are, or will be")
    every = len(os.sched_getaffinity(0))
    parser.add_argument("--llama-threads", type=int, default=every, help="fewer where others use the machine: its threads spin")
    return parser.parse_args(argv)


def measure(chosen: argparse.Namespace) -> Iterator[dict[str, object]]:
    """Writes the table to the standard error at the end."""
    figures = []
    with tempfile.TemporaryDirectory(prefix="kvk-") as folder:
        for figure in _measure(chosen, Path(folder)):
            figures.append(figure)
            yield figure
    print(tables(figures), file=sys.stderr)


def _measure(chosen: argparse.Namespace, folder: Path) -> Iterator[dict[str, object]]:
    found, skipped = _systems(chosen, environments.model(chosen.environments / "models", chosen.model))
    yield from skipped
    num_turns = sum(len(group) for group in found) * len(chosen.workloads) * (chosen.rounds + 1)
    with tqdm(total=num_turns, desc="peers", file=sys.stderr) as bar:
        for group in found:
            with ExitStack() as stack:
                running = []
                for system in group:
                    try:
                        each = Running(system, folder / f"{system.name}-{system.kind}.log")
                    except Ended as error:
                        yield {"system": system.name, "dtype": system.kind, "skipped": str(error)}
                        continue
                    stack.callback(each.end)
                    running.append(each)
                    yield {"system": system.name, "dtype": system.kind, "start_to_ready_s": round(each.ready_s, 2)}
                for name in chosen.workloads:
                    yield from take_turns(running, WORKLOADS[name], chosen.rounds, bar.update)


def _systems(chosen: argparse.Namespace, model: Path) -> tuple[list[list[System]], list[dict[str, object]]]:
    """By kind of numbers; and what cannot be had, with a sentence each."""
    skipped: list[dict[str, object]] = []
    peers = {}
    for name, make, folder in (("vllm", environments.vllm, "vllm"), ("llama.cpp", environments.llama_cpp, "llama")):
        if name in chosen.systems:
            try:
                peers[name] = make(chosen.environments / folder)
            except environments.Failed as error:
                skipped.append({"system": name, "skipped": str(error)})
    found = []
    for kind in chosen.dtypes:
        group = [systems.kvkeeper("kvkeeper", kind, model)] if "kvkeeper" in chosen.systems else []
        group += [systems.kvkeeper(chosen.tree.name, kind, model, chosen.tree.resolve())] if chosen.tree else []
        others = [
            systems.vllm(kind, model, peers["vllm"]) if "vllm" in peers else None,
            systems.llama_cpp(kind, model, peers["llama.cpp"], chosen.llama_threads) if "llama.cpp" in peers else None,
        ]
        found.append([*group, *filter(None, others)])
    return found, skipped


def _names(known: Sequence[str] | dict):  # type: ignore[no-untyped-def]
    def names(text: str) -> tuple[str, ...]:
        found = tuple(text.split(","))
        for name in found:
            if name not in known:
                raise argparse.ArgumentTypeError(f"there is no {name}; there are {', '.join(known)}")
        return found

    return names


if __name__ == "__main__":
    for figure in measure(choose(sys.argv[1:])):
        print(json.dumps({"bench": "peers", **figure}), flush=True)
