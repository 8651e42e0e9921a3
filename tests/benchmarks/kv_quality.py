"""`python -m tests.benchmarks.kv_quality`: what fewer bits of K and V cost a model, by the length of the context.

Reads texts with the model in this process, without a service. Owns the texts and needles, the table and the plot.
"""

import argparse
import json
import math
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from kvkeeper.cli.benchmark.bench import least, reported
from kvkeeper.cli.console.problems import EXIT_OK, UsageFailure
from kvkeeper.cli.console.tables import table
from tests.benchmarks import plot

if TYPE_CHECKING:
    from kvkeeper.engine_service.outputs.tokenizer import Tokenizer
    from tests.benchmarks.kv_errors import Measured, Needle, Tokens, Way

_LENGTHS = (512, 1024, 2048)
_WAYS = ("int8", "int8:256", "fp8", "fp8:256", "int4", "int4:256", "bfloat16")
_NUM_TEXTS, _NUM_NEEDLES = 6, 4  # needles at each length
_DTYPES = ("bfloat16", "float16")
_ALONE = ("attention_error_alone", "greatest_attention_error_alone")


def main(argv: Sequence[str] | None = None) -> int:
    """The exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.benchmarks.kv_quality",
        description="Perplexity, needles found again and the error of attention, by length of the context, against the model"
        " with K and V as it computes them.",
        allow_abbrev=False,
    )
    parser.add_argument("--model", type=Path, metavar="FOLDER", help="of a Hugging Face model (the demo model)")
    parser.add_argument("--text", type=Path, metavar="FILE", help="to read; without it the demo model's held-out texts")
    parser.add_argument(
        "--length", action="append", type=least(64), metavar="N", help=f"of the context, may be repeated ({_told(_LENGTHS)})"
    )
    parser.add_argument(
        "--way",
        action="append",
        metavar="W",
        help=f"kv dtype, or with a tail as in int8:256, or what all is computed in; may be repeated ({_told(_WAYS)})",
    )
    parser.add_argument("--texts", type=least(1), default=_NUM_TEXTS, metavar="N", help="at most so many (%(default)s)")
    parser.add_argument("--needles", type=least(0), default=_NUM_NEEDLES, metavar="N", help="at each length (%(default)s)")
    parser.add_argument("--seed", type=least(0), default=0, help="of the needles (%(default)s)")
    parser.add_argument("--plot", type=Path, metavar="OUT.png", help="draw what it costs by length")
    parser.add_argument("--json", action="store_true", help="print JSON")
    return reported(_run)(parser.parse_args(argv))


def _told(values: Sequence[object]) -> str:
    return ", ".join(map(str, values))


def _run(args: argparse.Namespace) -> int:
    from kvkeeper.engine_service.model.checkpoint.errors import ModelError
    from kvkeeper.engine_service.model.demo_model import DEMO_MODEL_DIR
    from kvkeeper.engine_service.outputs.tokenizer import Tokenizer
    from kvkeeper.kernels.cpu import compiled
    from tests.benchmarks import kv_errors

    compiled.switch(on=compiled.is_installed())
    folder, lengths = args.model or DEMO_MODEL_DIR, sorted(set(args.length or _LENGTHS))
    ways = [_way(text) for text in args.way or _WAYS]
    try:
        tokenizer = Tokenizer.load(folder)
        texts = _texts(tokenizer, args.text, max(lengths), args.texts)
        needles = _needles(tokenizer, texts, lengths, args.needles, args.seed)
        num_read = (1 + len(ways)) * (len(texts) + len(needles))
        with tqdm(total=num_read, desc="quality", unit="text", leave=False, disable=None) as bar:
            found = list(kv_errors.measure(folder, ways, texts, needles, lengths, bar.update))
    except ModelError as error:
        raise UsageFailure(f"--model {folder}: {error}") from None
    rows = _rows(found)
    if args.plot is not None:
        plot.draw_quality(_curves(rows), f"Perplexity by K and V stored ({Path(folder).name})", args.plot)
    print(json.dumps(rows) if args.json else _table(rows))
    return EXIT_OK


def _way(text: str) -> "Way":
    """Raises UsageFailure."""
    from kvkeeper.kernels.quantised.formats import FORMATS
    from tests.benchmarks.kv_errors import Way

    name, _, tail = text.partition(":")
    if name in _DTYPES and not tail:
        return Way(dtype=name)  # type: ignore[arg-type]  # one of DtypeChoice
    if name not in FORMATS or (tail and not tail.isdecimal()):
        raise UsageFailure(f"--way: one of {_told([*FORMATS, *_DTYPES])}, the former with :TOKENS of a tail; not {text}")
    return Way(name, int(tail or 0))


def _texts(tokenizer: "Tokenizer", file: Path | None, length: int, count: int) -> "list[Tokens]":
    """Token ids [length] each: the beginnings of the longest held-out texts, or pieces of the file. Raises UsageFailure."""
    import numpy as np

    from tests.support.models.demo_corpus import held_out_modules

    if file is None:
        sources = [module.text for module in held_out_modules()]
    else:
        try:
            sources = [file.read_text(encoding="utf-8")]
        except (OSError, UnicodeDecodeError) as error:
            raise UsageFailure(f"--text {file}: {error}") from None
    tokens = [np.array(tokenizer.encode(source), np.int64) for source in sources]
    if file is not None:
        tokens = [tokens[0][first : first + length] for first in range(0, len(tokens[0]) - length + 1, length)]
    texts = [each[:length] for each in sorted(tokens, key=len, reverse=True) if len(each) >= length][:count]
    if not texts:
        raise UsageFailure(f"--length {length}: no text has so many tokens, the longest has {max(map(len, tokens), default=0)}")
    return texts


def _needles(
    tokenizer: "Tokenizer", texts: "Sequence[Tokens]", lengths: Sequence[int], count: int, seed: int
) -> "list[Needle]":
    """Assignments of a random word, at all depths of texts of each length, that are asked for again at their end."""
    import numpy as np

    from tests.benchmarks.kv_errors import Needle

    drawn, needles = random.Random(seed), []
    for length in lengths:
        for number in range(count):
            word = "".join(drawn.choice("abcdefghijklmnopqrstuvwxyz") for _ in range(8))
            name = f"secret_{drawn.randrange(10, 100)}"
            told = np.array(tokenizer.encode(f'\n{name} = "{word}"\n'), np.int64)
            asked = np.array(tokenizer.encode(f'\nassert {name} == "'), np.int64)
            answer = np.array(tokenizer.encode(word), np.int64)
            hay = texts[number % len(texts)][: length - len(told) - len(asked) - len(answer)]
            at = round(len(hay) * (number + 1) / (count + 1))
            needles.append(Needle(np.concatenate((hay[:at], told, hay[at:], asked)), answer))
    return needles


def _rows(found: "Sequence[Measured]") -> list[dict[str, Any]]:
    exact = {each.length: each.perplexity for each in found if each.way.name == "exact"}
    return [
        {
            "way": each.way.name,
            "length": each.length,
            "perplexity": _number(each.perplexity),
            "perplexity_percent": _number(100 * (each.perplexity / exact[each.length] - 1)),
            "needles_found": _number(each.recall),
            "attention_error": _number(each.mean_error),
            "greatest_attention_error": _number(each.greatest_error),
            "attention_error_alone": None if each.alone is None else _number(each.alone.mean),
            "greatest_attention_error_alone": None if each.alone is None else _number(each.alone.greatest),
        }
        for each in found
    ]


def _number(value: float) -> float | None:
    return None if math.isnan(value) else float(f"{value:.4g}")


def _table(rows: Sequence[dict[str, Any]]) -> str:
    headers = (
        "way",
        "context",
        "perplexity",
        "against exact",
        "needles",
        "mean error",
        "greatest error",
        "alone",
        "greatest alone",
    )
    cells = [
        (
            row["way"],
            row["length"],
            row["perplexity"],
            f"{row['perplexity_percent']:+.3f} %",
            "-" if row["needles_found"] is None else f"{row['needles_found']:.0%}",
            f"{row['attention_error']:.2e}",
            f"{row['greatest_attention_error']:.2e}",
            *("-" if row[name] is None else f"{row[name]:.2e}" for name in _ALONE),
        )
        for row in rows
    ]
    return table(headers, cells)


def _curves(rows: Sequence[dict[str, Any]]) -> dict[str, list[tuple[int, float]]]:
    curves: dict[str, list[tuple[int, float]]] = {}
    for row in rows:
        if row["way"] != "exact":
            curves.setdefault(row["way"], []).append((row["length"], row["perplexity_percent"]))
    return curves


if __name__ == "__main__":
    sys.exit(main())
