"""The output of `kvkeeper generate`: continuations as they come, log probabilities, counts and times."""

import sys
from collections.abc import Callable
from dataclasses import asdict

from kvkeeper.cli.console.tables import table
from kvkeeper.client import OutputChunk, TokenLogprobs, Usage


class Printer:
    """Prints one continuation as it comes, and keeps the others until that one has ended."""

    def __init__(self, num_continuations: int, quiet: bool) -> None:
        self.texts = [""] * num_continuations
        self.token_ids: list[list[int]] = [[] for _ in range(num_continuations)]
        self.reasons: list[str | None] = [None] * num_continuations
        self.cumulative_logprobs: list[float | None] = [None] * num_continuations
        self.logprobs: list[list[TokenLogprobs]] = [[] for _ in range(num_continuations)]
        self._quiet = quiet
        self._shown = 0  # the continuation that is being printed
        self._num_printed: int | None = None  # characters of it; None before its heading

    def add(self, chunk: OutputChunk) -> None:
        self.texts[chunk.index] += chunk.text
        self.token_ids[chunk.index] += chunk.token_ids
        self.logprobs[chunk.index] += chunk.logprobs
        self.reasons[chunk.index] = chunk.finish_reason or self.reasons[chunk.index]
        self.cumulative_logprobs[chunk.index] = chunk.cumulative_logprob
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


def report(request_id: str, usage: Usage, first_ms: float | None, total_ms: float, printer: Printer) -> dict[str, object]:
    """The finished request as an object for JSON."""
    return {
        "request_id": request_id,
        **asdict(usage),
        "time_to_first_token_ms": None if first_ms is None else round(first_ms, 3),
        "total_ms": round(total_ms, 3),
        "continuations": [
            {
                "index": index,
                "text": printer.texts[index],
                "token_ids": printer.token_ids[index],
                "finish_reason": printer.reasons[index],
                "cumulative_logprob": printer.cumulative_logprobs[index],
                "logprobs": [asdict(place) for place in printer.logprobs[index]],
            }
            for index in range(len(printer.texts))
        ],
    }


def summary(usage: Usage, first_ms: float | None, total_ms: float, printer: Printer) -> str:
    """The finished request in one line for people."""
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


def logprobs_table(printer: Printer, text_of: Callable[[int], str]) -> str:
    """Log probabilities for people, a row for each token. text_of gives a token's text."""
    rows: list[tuple[object, ...]] = []
    for index, places in enumerate(printer.logprobs):
        for place in places:
            likeliest = "  ".join(f"{text_of(token_id)!r} {logprob:.3f}" for token_id, logprob in place.top)
            rows.append((index, repr(text_of(place.token_id)), f"{place.logprob:.3f}", place.rank, likeliest))
    headers = ("continuation", "token", "logprob", "rank", "likeliest")
    first = 0 if len(printer.texts) > 1 else 1
    return table(headers[first:], [row[first:] for row in rows])
