"""`kvkeeper chat`: a conversation in a terminal. What was said before is cached, so a turn costs its new tokens alone.

One turn a line, from a terminal or a pipe. Ctrl-C ends an answer, which the conversation keeps as far as it came; Ctrl-D ends
the conversation. A line that begins with a slash is for this program.
"""

import argparse
import sys
import time
from collections.abc import Callable

from kvkeeper.cli.console.addresses import add_engine_flag
from kvkeeper.cli.console.arguments import number, seed, stop_text, utf8, whole
from kvkeeper.cli.console.outcome import OPTIONS, failure
from kvkeeper.cli.console.problems import EXIT_OK
from kvkeeper.cli.generation.continuations import Printer, summary
from kvkeeper.client import EngineClient, GenerateOptions, KvkeeperError, Sampling, Usage

_PROMPT = "> "
_COMMANDS = {
    "/system TEXT": "sets the system message, or without a text removes it",
    "/undo": "takes the last turn and its answer back",
    "/clear": "begins anew, with the same system message",
    "/help": "shows these lines",
    "/quit": "ends the conversation, as Ctrl-D does",
}


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.description = "One turn a line; /help says what else. Ctrl-C ends an answer, Ctrl-D the conversation."
    parser.add_argument("--system", type=utf8, metavar="TEXT", help="system message of the conversation")
    parser.add_argument("--max-tokens", type=whole, metavar="X", help="most new tokens of an answer (default: 256, or as fit)")
    parser.add_argument("--temperature", type=number, metavar="X", help="0 takes the likeliest (default: the model's, else 1)")
    parser.add_argument("--seed", type=seed, metavar="X", help="seed of the random stream (default: a new one for each answer)")
    parser.add_argument(
        "--stop", action="append", default=[], type=stop_text, metavar="TEXT", help="text that ends an answer; may be repeated"
    )
    parser.add_argument("--tenant", default="", type=utf8, metavar="NAME", help="tenant whose cache the conversation shares")
    add_engine_flag(parser)


def run(args: argparse.Namespace) -> int:
    with EngineClient(args.engine, OPTIONS) as client:
        return _Conversation(client, args).run(_reader())


class _Conversation:
    """The turns so far, and what is asked for with each."""

    def __init__(self, client: EngineClient, args: argparse.Namespace) -> None:
        self._client = client
        self._args = args
        self._system: str | None = args.system
        self._turns: list[dict[str, str]] = []  # of the user and of the model, in turns

    def run(self, read: Callable[[], str]) -> int:
        """Converse until the last line. Returns the exit code."""
        while True:
            try:
                line = read()
            except (EOFError, KeyboardInterrupt):
                print(file=sys.stderr)
                return EXIT_OK
            if line.startswith("/"):
                if line.strip() == "/quit":
                    return EXIT_OK
                self._obey(line.strip())
            elif line.strip() and (code := self._ask(line)) is not None:
                return code

    def _ask(self, text: str) -> int | None:
        """One turn; an exit code where nothing can be asked any more."""
        messages = [*self._head(), *self._turns, {"role": "user", "content": text}]
        printer = Printer(1, quiet=False)
        started, first_token = time.monotonic(), None
        try:
            with self._client.generate(messages, self._options()) as generation:
                try:
                    for chunk in generation:
                        first_token = first_token or time.monotonic()
                        printer.add(chunk)
                except KeyboardInterrupt:
                    printer.reasons[0] = "ended by Ctrl-C"
        except KvkeeperError as error:
            if printer.texts[0]:
                printer.end()
            code = failure(error, self._args)
            return code if error.service_down or not self._turns else None
        printer.end()
        self._turns += [messages[-1], {"role": "assistant", "content": printer.texts[0]}]
        usage = generation.usage or Usage(0, 0, len(printer.token_ids[0]), 0, 0)
        first_ms = None if first_token is None else (first_token - started) * 1000
        print(summary(usage, first_ms, (time.monotonic() - started) * 1000, printer), file=sys.stderr)
        return None

    def _obey(self, line: str) -> None:
        word, _, rest = line.partition(" ")
        if word == "/system":
            self._system = rest.strip() or None
        elif word == "/undo":
            del self._turns[-2:]
        elif word == "/clear":
            self._turns.clear()
        else:
            width = max(map(len, _COMMANDS))
            print("\n".join(f"{name.ljust(width)}  {text}" for name, text in _COMMANDS.items()), file=sys.stderr)

    def _head(self) -> list[dict[str, str]]:
        return [] if self._system is None else [{"role": "system", "content": self._system}]

    def _options(self) -> GenerateOptions:
        args = self._args
        sampling = Sampling(max_tokens=args.max_tokens, temperature=args.temperature, seed=args.seed, stop=tuple(args.stop))
        return GenerateOptions(tenant=args.tenant, reuse_hint="soon", sampling=sampling)


def _reader() -> Callable[[], str]:
    """Reads a line; raises EOFError behind the last. On a terminal with a prompt, and the keys that edit a line."""
    if sys.stdin.isatty():
        import readline  # noqa: F401  input() edits lines with it from now on

        return lambda: input(_PROMPT)

    def read() -> str:
        line = sys.stdin.readline()
        if not line:
            raise EOFError
        return line.rstrip("\n")

    return read
