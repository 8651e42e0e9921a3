"""`python -m tests.model_check`: serves the model, and compares it with transformers. Exits 1 when a row failed."""

import asyncio
import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.live import Live
from rich.table import Table
from transformers import AutoModelForCausalLM, AutoTokenizer

from kvkeeper.cli.models.named import find_model
from kvkeeper.client import AsyncEngineClient, CallOptions, GenerateOptions, OutputChunk, Sampling, Usage

NUM_NEW = 24
MOST_DIFFERENCE = 1e-3  # of a log probability, between two float32 computations
# Of a log probability. int8 was 0.045 off on a processor with AVX2, and int4 0.039, whose bits are the file's own.
MOST_ON_AVERAGE = {"bfloat16": 0.05, "int8": 0.07, "int4": 0.07}
SUBJECTS = ("a lighthouse", "the number 1,234.56", "Überraschungen in Köln", "日本の首都", "def merge(a, b):")
FRAMES = (
    "{}",
    "The most interesting thing about {} is that",
    "Question: what do you know of {}?\nAnswer:",
    "1. {}\n2. something else\n3.",
    "Once upon a time there was {}, and",
    '{{"name": "{}", "year": 2026, "items": [',
    "Dear Sir or Madam,\n\n    I write to you because of {}.",
    "{} {} {}",
    "In short: {}.\n\nIn detail:",
    "# {}\n\nfor i in range(10):\n    ",
)
PROMPTS = [frame.format(*[subject] * 3) for frame in FRAMES for subject in SUBJECTS]
TURNS = (
    "What is the capital of France?",
    "And of Italy?",
    "Which of the two is larger?",
    "Name a river there.",
    "Write one line about it.",
    "Now in capital letters.",
    "How many words was that?",
    "Thank you. Say goodbye.",
)
GREEDY = Sampling(max_tokens=NUM_NEW, temperature=0.0, num_logprobs=0)


@dataclass(frozen=True)
class Output:
    token_ids: list[int]
    logprobs: list[float]
    usage: Usage


class Reference:
    """transformers' own computation, in float32."""

    def __init__(self, folder: Path) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    def prompt(self, turns: list[dict[str, str]]) -> list[int]:
        ids: Any = self.tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_dict=False)
        return list(ids)

    @torch.inference_mode()
    def next_logprobs(self, prompt: list[int], output: list[int]) -> torch.Tensor:
        """[len(output), vocabulary], of each token of the output behind all before it."""
        logits = self._model(torch.tensor([prompt + output])).logits[0, len(prompt) - 1 : -1]
        return logits.log_softmax(-1)


@asynccontextmanager
async def serving(folder: Path, *flags: str) -> AsyncIterator[AsyncEngineClient]:
    """Both services with the model, on Unix sockets."""
    with tempfile.TemporaryDirectory(prefix="kvk-") as place:
        cache, engine = f"unix:{place}/cache", f"unix:{place}/engine"
        command = [sys.executable, "-m", "kvkeeper.cli", "up", "--model", str(folder), "--cache-listen", cache]
        with (Path(place) / "log").open("wb") as log:
            up = await asyncio.create_subprocess_exec(*command, "--engine-listen", engine, *flags, stdout=log, stderr=log)
        try:
            async with AsyncEngineClient(engine, CallOptions(timeout_s=600, retry_s=300)) as client:
                await client.model()
                yield client
        finally:
            up.terminate()
            await up.wait()


async def ask(client: AsyncEngineClient, prompt: object) -> Output:
    generation = client.generate(prompt, GenerateOptions(sampling=GREEDY))  # type: ignore[arg-type]
    chunks: list[OutputChunk] = [chunk async for chunk in generation]
    assert generation.usage is not None
    tokens = [token for chunk in chunks for token in chunk.token_ids]
    return Output(tokens, [each.logprob for chunk in chunks for each in chunk.logprobs], generation.usage)


class Check:
    """The rows of the report."""

    def __init__(self, folder: Path, live: Live) -> None:
        self._folder, self._reference, self._live = folder, Reference(folder), live
        self._table = Table("SmolLM2-135M-Instruct against transformers", "", "")
        self.has_failed = False

    async def run(self) -> None:
        async with serving(self._folder, "--engine-dtype", "float32") as client:
            first = await self._tokens(client)
            again = await asyncio.gather(*(ask(client, prompt) for prompt in PROMPTS))
            same = [one.token_ids == other.token_ids for one, other in zip(first, again, strict=True)]
            cached = sum(output.usage.cached_tokens for output in again)
            self._row(
                "the same at once, from the cache",
                all(same) and cached > 0,
                f"{sum(same)} of {len(same)}, {cached} tokens cached",
            )
            await self._conversation(client)
        async with serving(self._folder, "--engine-dtype", "float32", "--cache-num-blocks", "40") as client:
            pressed = await asyncio.gather(*(ask(client, prompt) for prompt in PROMPTS))
            num_preempted = sum(output.usage.num_preemptions > 0 for output in pressed)
            same = [one.token_ids == other.token_ids for one, other in zip(first, pressed, strict=True)]
            self._row(
                "preempted in a pool of 40 blocks",
                all(same) and num_preempted > 0,
                f"{sum(same)} of {len(same)}, {num_preempted} preempted",
            )
        for dtype, most in MOST_ON_AVERAGE.items():
            async with serving(self._folder, "--engine-dtype", dtype) as client:
                outputs = [await ask(client, prompt) for prompt in PROMPTS]
            difference, num_best = self._differences(outputs)
            mean, share = sum(difference) / len(difference), num_best / len(difference)
            self._row(
                f"each token, in {dtype}",
                mean < most,
                f"{share:.1%} the likeliest, log p off by {mean:.4f}",
            )

    async def _tokens(self, client: AsyncEngineClient) -> list[Output]:
        prompts = [self._reference.tokenizer(prompt).input_ids for prompt in PROMPTS]
        tokenized = [await client.tokenize(prompt) for prompt in PROMPTS]
        self._row("tokens of prompts", list(map(list, tokenized)) == prompts, f"{sum(map(len, prompts))} tokens")
        outputs = [await ask(client, prompt) for prompt in PROMPTS]
        difference, num_best = self._differences(outputs)
        best = f"{num_best} of {len(difference)} the likeliest, log p off by at most {max(difference):.1e}"
        self._row("each token, in float32", num_best == len(difference) and max(difference) < MOST_DIFFERENCE, best)
        return outputs

    def _differences(self, outputs: Sequence[Output]) -> tuple[list[float], int]:
        """How far each log probability is from transformers', and how many tokens are the likeliest there."""
        differences, num_best = [], 0
        for prompt, output in zip(PROMPTS, outputs, strict=True):
            logprobs = self._reference.next_logprobs(self._reference.tokenizer(prompt).input_ids, output.token_ids)
            own = logprobs[torch.arange(len(output.token_ids)), output.token_ids]
            differences += (own - torch.tensor(output.logprobs)).abs().tolist()
            num_best += int((own >= logprobs.max(-1).values - MOST_DIFFERENCE).sum())
        return differences, num_best

    async def _conversation(self, client: AsyncEngineClient) -> None:
        turns: list[dict[str, str]] = []
        same, cached, total = [], 0, 0
        for text in TURNS:
            turns.append({"role": "user", "content": text})
            output = await ask(client, turns)
            prompt = self._reference.prompt(turns)
            logprobs = self._reference.next_logprobs(prompt, output.token_ids)
            own = logprobs[torch.arange(len(output.token_ids)), output.token_ids]
            same.append(
                output.usage.prompt_tokens == len(prompt) and bool((own >= logprobs.max(-1).values - MOST_DIFFERENCE).all())
            )
            cached, total = cached + output.usage.cached_tokens, total + len(prompt)
            turns.append(
                {
                    "role": "assistant",
                    "content": str(self._reference.tokenizer.decode(output.token_ids, skip_special_tokens=True)),
                }
            )
        self._row(
            "a conversation of 8 turns",
            all(same) and cached > 0,
            f"{sum(same)} of {len(same)} turns, {cached} of {total} tokens cached",
        )

    def _row(self, name: str, is_good: bool, text: str) -> None:
        self._table.add_row(name, "good" if is_good else "FAILED", text)
        self.has_failed |= not is_good
        self._live.update(self._table, refresh=True)


def main() -> int:
    console = Console()
    folder = Path(find_model("smollm2", console.print))
    with Live(console=console) as live:
        check = Check(folder, live)
        asyncio.run(check.run())
    return 1 if check.has_failed else 0


if __name__ == "__main__":
    sys.exit(main())
