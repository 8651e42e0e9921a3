"""`python -m tests.benchmarks [NAME ...]`: runs the named benchmarks, or all; one JSON object a line on standard output.

Without a name all run but those that install environments of some GB.
"""

import argparse
import importlib
import json
import sys

NAMES = (
    "step_core",
    "keep",
    "kills",
    "tiers",
    "tier_faults",
    "evict",
    "step",
    "step_lane",
    "hand_off",
    "admission",
    "starts",
    "flat",
    "crowd",
    "delay",
    "bounds",
    "host",
    "device_step",
    "graph_step",
    "generate",
    "serve",
    "beams",
    "reuse",
    "chunking",
    "preempt",
    "speculation",
    "quality",
    "groups",
    "recurrence",
    "tensor_parallel",
    "kv_dtypes",
    "trace",
    "hints",
    "policies",
    "roles",
    "http",
    "reports",
    "hostile",
    "nodes",
    "peers",
)
_BY_NAME_ALONE = {"peers"}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(NAMES))
    chosen = parser.parse_args().names or [name for name in NAMES if name not in _BY_NAME_ALONE]
    unknown = set(chosen) - set(NAMES)
    if unknown:
        parser.error(f"no benchmark {', '.join(sorted(unknown))}; there are {', '.join(NAMES)}")
    for name in chosen:
        for figure in importlib.import_module(f"tests.benchmarks.{name}").figures():
            print(json.dumps({"bench": name, **figure}), flush=True)
    sys.stdout.flush()


if __name__ == "__main__":
    main()
