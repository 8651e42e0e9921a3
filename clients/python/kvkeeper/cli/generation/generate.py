"""`kvkeeper generate`: the text goes to stdout as it comes, counts and times go to stderr."""

import argparse
import json
import sys
import time
from functools import cache

from kvkeeper.cli.console.outcome import OPTIONS
from kvkeeper.cli.console.problems import EXIT_FAILED, EXIT_OK, EXIT_USAGE, complain, warn
from kvkeeper.cli.generation.continuations import Printer, logprobs_table, report, summary
from kvkeeper.cli.generation.flags import add_flags as add_flags
from kvkeeper.cli.generation.flags import make_options, make_prompt, wrong_together
from kvkeeper.client import EngineClient, Usage
from kvkeeper.common.service import VERSION
from kvkeeper.common.tracing.exporting import TracingUnavailable, export_spans


def run(args: argparse.Namespace) -> int:
    if reason := wrong_together(args):
        args.usage_error(reason)
    prompt = _read_prompt(args)
    if prompt is None:
        return EXIT_USAGE
    if not args.trace_endpoint:
        return _generate(prompt, args)
    try:
        stop_export = export_spans(
            args.trace_endpoint, "kvkeeper-client", VERSION, lambda text: warn(f"trace: {text}", is_json=args.json)
        )
    except TracingUnavailable as error:
        complain(f"--trace-endpoint: {error}", reason="USAGE", is_json=args.json)
        return EXIT_FAILED
    try:
        return _generate(prompt, args)
    finally:
        stop_export()


def _generate(text: str, args: argparse.Namespace) -> int:
    printer = Printer(args.n or 1, quiet=args.json)
    started = time.monotonic()
    first_token = None
    with EngineClient(args.engine, OPTIONS) as client:
        with client.generate(make_prompt(text, args), make_options(args)) as generation:
            for chunk in generation:
                if first_token is None and chunk.token_ids:
                    first_token = time.monotonic()
                printer.add(chunk)
        total_ms = (time.monotonic() - started) * 1000
        first_ms = None if first_token is None else (first_token - started) * 1000
        usage = generation.usage or Usage(0, 0, 0, 0, 0)
        if args.json:
            print(json.dumps(report(generation.request_id, usage, first_ms, total_ms, printer)))
        else:
            printer.end()
            if args.logprobs is not None:
                text_of = cache(lambda token_id: client.detokenize([token_id], keep_special_tokens=True))
                print(logprobs_table(printer, text_of), file=sys.stderr)
            print(summary(usage, first_ms, total_ms, printer), file=sys.stderr)
    return _verdict(printer, args)


def _verdict(printer: Printer, args: argparse.Namespace) -> int:
    """The exit code; says which limit cut the output short."""
    limits = {
        "timed_out": f"cut short by --timeout-ms {args.timeout_ms}; a larger one gives it more time",
        "stalled": "cut short: the engine made no progress",
    }
    for reason, text in limits.items():
        if reason in printer.reasons:
            complain(text, reason=reason.upper(), is_json=args.json)
    return EXIT_FAILED if {"error", "cancelled", *limits}.intersection(printer.reasons) else EXIT_OK


def _read_prompt(args: argparse.Namespace) -> str | None:
    """The prompt's text. None when it cannot be read, which has been reported."""
    if args.prompt not in (None, "-"):
        return str(args.prompt)
    has_pipe = sys.stdin is not None and not sys.stdin.isatty()
    if args.prompt is None and args.prompt_file is None and not has_pipe:
        args.usage_error(_NO_PROMPT)
    source = "stdin" if args.prompt_file is None else "--prompt-file"
    try:
        raw = sys.stdin.buffer.read() if args.prompt_file is None else args.prompt_file.read_bytes()
        text = str(raw.decode("utf-8"))
    except OSError as error:
        complain(f"{source} cannot be read: {error.strerror}", reason="USAGE", is_json=args.json)
        return None
    except UnicodeDecodeError:
        complain(f"{source} is not UTF-8 text", reason="USAGE", is_json=args.json)
        return None
    if not text and args.prompt is None and args.prompt_file is None:  # an empty pipe: the prompt was forgotten
        args.usage_error(_NO_PROMPT)
    return text


_NO_PROMPT = "give a prompt, pipe one in, or name a file with --prompt-file PATH"
