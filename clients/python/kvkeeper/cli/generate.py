"""`kvkeeper generate`: text to stdout as it comes, what it took to stderr."""

import argparse
import json
import sys
import time
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from kvkeeper.cli.addresses import add_engine_flag, add_json_flag
from kvkeeper.cli.outcome import EXIT_FAILED, EXIT_OK, EXIT_USAGE, OPTIONS
from kvkeeper.client import BeamSearch, EngineClient, GenerateOptions, Piece, Retention, Sampling, Usage
from kvkeeper.service import VERSION
from kvkeeper.tracing.exporting import TracingUnavailable, export_spans

_CUT_SHORT = {"error", "cancelled", "timed_out", "stalled"}  # finish reasons
_DEFAULT_SINK = 4  # tokens; what the models need that were not trained with a sink of their own (arXiv 2309.17453)


def _whole(text: str, bits: int = 32) -> int:
    """A number that the message can hold; the service knows what it may be."""
    try:
        number = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"a whole number, not {text!r}") from None
    if not -(2 ** (bits - 1)) <= number < 2 ** (bits - 1):
        raise argparse.ArgumentTypeError(f"{text} is beyond {bits} bits")
    return number


def _seed(text: str) -> int:
    return _whole(text, bits=64)


def utf8(text: str) -> str:
    """Arguments are bytes; what is not UTF-8 in them Python hides in surrogates, which no message can hold."""
    if not text.isascii() and any("\ud800" <= character <= "\udfff" for character in text):
        raise argparse.ArgumentTypeError("not UTF-8 text")
    return text


def _pair(text: str) -> tuple[str, str]:
    key, equals, value = utf8(text).partition("=")
    if not key or not equals:
        raise argparse.ArgumentTypeError(f"KEY=VALUE, not {text!r}")
    return key, value


_SAMPLING_FLAGS = {
    "max_tokens": (_whole, "most new tokens per continuation (default: 256, or what fits)"),
    "temperature": (float, "0 is greedy (default: 0.7)"),
    "top_p": (float, "smallest set of tokens with this total probability (default: 0.9)"),
    "top_k": (_whole, "most likely tokens kept; 0 is off (default: 40)"),
    "min_p": (float, "least probability relative to the likeliest token (default: off)"),
    "repetition_penalty": (float, "1 is off (default: 1.1)"),
    "frequency_penalty": (float, "-2 to 2 (default: 0)"),
    "presence_penalty": (float, "-2 to 2 (default: 0)"),
    "seed": (_seed, "seed of the random stream (default: a new one for each request)"),
}


def add_parser(commands: Any) -> None:
    parser = commands.add_parser("generate", help="continue a prompt", allow_abbrev=False)
    parser.add_argument("prompt", nargs="?", type=utf8, help="text to continue; - reads it from stdin")
    parser.add_argument("--prompt-file", type=Path, metavar="PATH", help="read the prompt from a file")
    parser.add_argument(
        "--n", type=_whole, metavar="N", help="continuations of the prompt, which is computed once (default: 1)"
    )
    parser.add_argument(
        "--best-of", type=_whole, metavar="X", help="compute so many and show the N likeliest, all at the end (default: N)"
    )
    parser.add_argument(
        "--beams", type=_whole, metavar="X", help="search for the N likeliest with so many beams instead of drawing them"
    )
    parser.add_argument("--length-penalty", type=float, metavar="X", help="of --beams: above 0 is for longer ones (default: 1)")
    parser.add_argument("--early-stopping", action="store_true", help="of --beams: end once as many continuations have ended")
    for name, (kind, text) in _SAMPLING_FLAGS.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=kind, metavar="X", help=text)
    parser.add_argument(
        "--stop", action="append", default=[], type=utf8, metavar="TEXT", help="ends the output; may be repeated"
    )
    parser.add_argument("--ignore-eos", action="store_true", help="go on past the end-of-sequence token")
    parser.add_argument("--priority", type=_whole, metavar="X", default=0, help="larger is more important")
    parser.add_argument(
        "--timeout-ms",
        type=_whole,
        metavar="MS",
        help="most time it may take (default: none, while it makes progress)",
    )
    parser.add_argument("--tenant", default="", type=utf8, metavar="NAME", help="whose cache the prompt shares")
    parser.add_argument("--skip-look-up", action="store_true", help="do not take the prompt's KV from the cache")
    parser.add_argument(
        "--sink", type=_whole, metavar="N", help="with --window: first tokens that are kept for ever (default: 4)"
    )
    parser.add_argument(
        "--window", type=_whole, metavar="N", help="attend to the sinks and the last N tokens alone (default: to all)"
    )
    parser.add_argument("--session-id", default="", type=utf8, metavar="NAME", help="conversation that it belongs to")
    parser.add_argument(
        "--metadata", action="append", default=[], type=_pair, metavar="KEY=VALUE", help="kept with it; may be repeated"
    )
    parser.add_argument("--trace-endpoint", metavar="URL", help="OpenTelemetry collector that gets a trace of it")
    add_engine_flag(parser)
    add_json_flag(parser)
    parser.set_defaults(run=run, asks="engine", usage_error=parser.error)


def run(args: argparse.Namespace) -> int:
    if args.beams is None and (args.length_penalty is not None or args.early_stopping):
        args.usage_error("--length-penalty and --early-stopping go with --beams")
    if args.sink is not None and args.window is None:
        args.usage_error("--sink goes with --window")
    prompt = _read_prompt(args)
    if prompt is None:
        return EXIT_USAGE
    if not args.trace_endpoint:
        return _generate(prompt, args)
    try:
        stop_export = export_spans(args.trace_endpoint, "kvkeeper-client", VERSION, _warn)
    except TracingUnavailable as error:
        print(f"kvkeeper: --trace-endpoint: {error}", file=sys.stderr)
        return EXIT_FAILED
    try:
        return _generate(prompt, args)
    finally:
        stop_export()


def _warn(text: str) -> None:
    print(f"kvkeeper: trace: {text}", file=sys.stderr)


def _generate(prompt: str, args: argparse.Namespace) -> int:
    printer = _Printer(args.n or 1, quiet=args.json)
    started = time.monotonic()
    first_token = None
    with EngineClient(args.engine, OPTIONS) as client, client.generate(prompt, _options(args)) as generation:
        for piece in generation:
            if first_token is None and piece.token_ids:
                first_token = time.monotonic()
            printer.take(piece)
    total_ms = (time.monotonic() - started) * 1000
    first_ms = None if first_token is None else (first_token - started) * 1000
    usage = generation.usage or Usage(0, 0, 0, 0, 0)
    if args.json:
        print(json.dumps(_report(generation.request_id, usage, first_ms, total_ms, printer)))
    else:
        printer.end()
        print(_summary(usage, first_ms, total_ms, printer), file=sys.stderr)
        if "timed_out" in printer.reasons:
            print(f"kvkeeper: cut short by --timeout-ms {args.timeout_ms}", file=sys.stderr)
    return EXIT_FAILED if _CUT_SHORT.intersection(printer.reasons) else EXIT_OK


class _Printer:
    """Prints one continuation as it comes and keeps the others until it has ended."""

    def __init__(self, num_continuations: int, quiet: bool) -> None:
        self.texts = [""] * num_continuations
        self.token_ids: list[list[int]] = [[] for _ in range(num_continuations)]
        self.reasons: list[str | None] = [None] * num_continuations
        self.cumulative_logprobs: list[float | None] = [None] * num_continuations
        self._quiet = quiet
        self._shown = 0  # the continuation that is being printed
        self._num_printed: int | None = None  # characters of it; None before its heading

    def take(self, piece: Piece) -> None:
        self.texts[piece.index] += piece.text
        self.token_ids[piece.index] += piece.token_ids
        self.reasons[piece.index] = piece.finish_reason or self.reasons[piece.index]
        self.cumulative_logprobs[piece.index] = piece.cumulative_logprob
        self._print_on()
        while self.reasons[self._shown] is not None and self._shown + 1 < len(self.texts):
            self._shown += 1
            self._num_printed = None
            self._write("\n")
            self._print_on()

    def end(self) -> None:
        self._write("\n")

    def _print_on(self) -> None:
        if self._num_printed is None:
            if len(self.texts) > 1:
                self._write(f"--- continuation {self._shown + 1} of {len(self.texts)} ---\n")
            self._num_printed = 0
        text = self.texts[self._shown]
        self._write(text[self._num_printed :])
        self._num_printed = len(text)

    def _write(self, text: str) -> None:
        if not self._quiet and text:
            sys.stdout.write(text)
            sys.stdout.flush()


def _read_prompt(args: argparse.Namespace) -> str | None:
    if (args.prompt is None) == (args.prompt_file is None):
        args.usage_error("give a prompt, or --prompt-file PATH")
    if args.prompt_file is None and args.prompt != "-":
        return str(args.prompt)
    source = "stdin" if args.prompt_file is None else "--prompt-file"
    try:
        raw = sys.stdin.buffer.read() if args.prompt_file is None else args.prompt_file.read_bytes()
        return str(raw.decode("utf-8"))
    except OSError as error:
        print(f"kvkeeper: {source} cannot be read: {error.strerror}", file=sys.stderr)
    except UnicodeDecodeError:
        print(f"kvkeeper: {source} is not UTF-8 text", file=sys.stderr)
    return None


def _retention(args: argparse.Namespace) -> Retention | None:
    if args.window is None:
        return None
    return Retention(_DEFAULT_SINK if args.sink is None else args.sink, args.window)


def _options(args: argparse.Namespace) -> GenerateOptions:
    chosen = {field.name: getattr(args, field.name) for field in fields(Sampling) if hasattr(args, field.name)}
    chosen["stop"] = tuple(args.stop)
    return GenerateOptions(
        n=args.n,
        best_of=args.best_of,
        beam_search=None if args.beams is None else BeamSearch(args.beams, args.length_penalty, args.early_stopping),
        priority=args.priority,
        timeout_ms=args.timeout_ms,
        tenant=args.tenant,
        skip_look_up=args.skip_look_up,
        retention=_retention(args),
        session_id=args.session_id,
        metadata=dict(args.metadata),
        sampling=Sampling(**chosen),
    )


def _report(request_id: str, usage: Usage, first_ms: float | None, total_ms: float, printer: _Printer) -> dict[str, object]:
    continuations = zip(printer.texts, printer.token_ids, printer.reasons, printer.cumulative_logprobs, strict=True)
    return {
        "request_id": request_id,
        **asdict(usage),
        "time_to_first_token_ms": None if first_ms is None else round(first_ms, 3),
        "total_ms": round(total_ms, 3),
        "continuations": [
            {"index": index, "text": text, "token_ids": token_ids, "finish_reason": reason, "cumulative_logprob": logprob}
            for index, (text, token_ids, reason, logprob) in enumerate(continuations)
        ],
    }


def _summary(usage: Usage, first_ms: float | None, total_ms: float, printer: _Printer) -> str:
    reasons = ", ".join(dict.fromkeys((reason or "none").replace("_", " ") for reason in printer.reasons))
    parts = [
        f"prompt {usage.prompt_tokens} tokens",
        f"cached {usage.cached_tokens}",
        f"new {usage.new_tokens}",
        f"finish: {reasons}",
        "no token" if first_ms is None else f"first token after {first_ms:.0f} ms",
        f"{usage.new_tokens / total_ms * 1000:.0f} tokens/s",
    ]
    if usage.copied_blocks:
        parts.append(f"copied blocks {usage.copied_blocks}")
    if usage.num_preemptions:
        parts.append(f"preempted {usage.num_preemptions} times")
    return "[" + " | ".join(parts) + "]"
