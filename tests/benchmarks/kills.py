"""What two kills leave: hits and time to first token on an empty cache, again, and after SIGKILL of either service.

The prompts are the same each time, one at a time, with the 32 M parameter Llama. The cache service keeps its memory on tmpfs.
Before they are measured, a service that was started gets one other prompt. `python -m tests.benchmarks.kills PICTURE` draws the
figures.
"""

import asyncio
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from kvkeeper.cli.show.readiness import until_serving
from kvkeeper.cli.start.processes import ServiceProcess
from kvkeeper.client import AsyncEngineClient
from tests.benchmarks.both_services import ask
from tests.benchmarks.llama import build_folder, random_prompt
from tests.support.worlds.memory_folder import memory_folder

_NUM_PROMPTS, _PROMPT_LEN, _NUM_NEW, _NUM_BLOCKS = 8, 1536, 4, 1024
_START_S, _GRACE_S = 120.0, 10.0
_COLORS = ("#9aa5b1", "#2f6db3", "#2f6db3", "#2f6db3")


def figures() -> Iterator[dict[str, object]]:
    yield from asyncio.run(_measure())


async def _measure() -> list[dict[str, object]]:
    rng = np.random.default_rng(0)
    prompts = [random_prompt(rng, _PROMPT_LEN) for _ in range(_NUM_PROMPTS)]
    other = random_prompt(rng, _PROMPT_LEN)
    with tempfile.TemporaryDirectory() as folder, memory_folder() as memory:
        build_folder(Path(folder) / "model")
        cache_at, engine_at = f"unix:{folder}/cache", f"unix:{folder}/engine"
        cache_flags = ("--runtime-dir", folder, "--memory-dir", str(memory), "--keep", "--num-blocks", str(_NUM_BLOCKS))
        engine_flags = ("--cache", cache_at, "--model", f"{folder}/model", "--threads", "1")
        services = [await _start("cache", cache_at, *cache_flags)]
        try:
            services.insert(0, await _start("engine", engine_at, *engine_flags))
            async with AsyncEngineClient(engine_at) as client:
                await ask(client, other, _NUM_NEW)
                rows = [await _phase("empty cache", client, prompts), await _phase("again", client, prompts)]
            await _kill(services.pop(0))
            services.insert(0, await _start("engine", engine_at, *engine_flags))
            async with AsyncEngineClient(engine_at) as client:
                await ask(client, other, _NUM_NEW)
                rows.append(await _phase("engine killed", client, prompts))
                await _kill(services.pop())
                services.append(await _start("cache", cache_at, *cache_flags))
                await ask(client, other, _NUM_NEW)
                rows.append(await _phase("cache service killed", client, prompts))
        finally:
            for service in services:
                await service.end(_GRACE_S)
    return rows


async def _start(name: str, address: str, *flags: str) -> ServiceProcess:
    service = await ServiceProcess.start(name, ["--listen", address, "--log-level", "warning", *flags])
    await asyncio.wait_for(until_serving(address), _START_S)
    return service


async def _kill(service: ServiceProcess) -> None:
    service.kill()
    await service.ended


async def _phase(name: str, client: AsyncEngineClient, prompts: Sequence[np.ndarray]) -> dict[str, object]:
    replies = [await ask(client, prompt, _NUM_NEW) for prompt in prompts]
    return {
        "case": name,
        "hit_share": round(sum(reply.num_cached for reply in replies) / (_PROMPT_LEN * len(prompts)), 4),
        "first_token_ms": round(statistics.median(reply.first_token_seconds for reply in replies) * 1e3, 1),
    }


def draw(rows: Sequence[dict[str, object]], picture: Path) -> None:
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    names = [str(row["case"]).replace(" killed", "\nkilled") for row in rows]
    columns = (
        ("prompt tokens found in the cache, %", [100 * float(str(row["hit_share"])) for row in rows]),
        ("time to first token, ms", [float(str(row["first_token_ms"])) for row in rows]),
    )
    figure, axes = pyplot.subplots(1, 2, figsize=(9, 2.6), layout="constrained")
    for axis, (title, values) in zip(axes, columns, strict=True):
        bars = axis.bar(names, values, color=_COLORS, width=0.6)
        axis.bar_label(bars, fmt="%.0f")
        axis.set_title(title, fontsize=10)
        axis.set_ylim(0, max(values) * 1.18)
        axis.spines[["top", "right"]].set_visible(False)
        axis.tick_params(labelsize=8)
    figure.savefig(picture, dpi=130)


if __name__ == "__main__":
    measured = list(figures())
    for row in measured:
        print(row)
    draw(measured, Path(sys.argv[1]))
