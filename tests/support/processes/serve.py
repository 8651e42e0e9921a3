"""`kvkeeper serve` with the demo model as a hub's client keeps it, and no hub that could be asked for anything."""

import json
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from kvkeeper.engine_service.model.demo_model import DEMO_MODEL_DIR
from tests.support.processes.services import environment, free_ports, short_folder
from tests.support.stand_ins.hub import Hub, hub

END_S = 60.0
MODEL = "acme/small-model"
# As the demo model's own, and with what shapes the distribution where a request does not say.
GENERATION_CONFIG = {"eos_token_id": 0, "temperature": 0.7, "top_k": 20, "repetition_penalty": 1.05, "typical_p": 0.9}


@dataclass(frozen=True)
class Served:
    """What `kvkeeper serve` said, and its process. log: of all three; told: how much of it was there before it said ready."""

    ready: dict[str, str]
    process: "subprocess.Popen[str]"
    log: Path
    told: str
    folder: Path
    hub: Hub

    @property
    def model(self) -> str:
        return self.ready["model"]


def snapshot(folder: Path) -> Path:
    """The demo model with defaults for sampling, in the folder of a hub's client."""
    found = folder / f"models--{MODEL.replace('/', '--')}" / "snapshots" / ("5" * 40)
    found.mkdir(parents=True)
    for name in ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(DEMO_MODEL_DIR / name, found / name)
    (found / "generation_config.json").write_text(json.dumps(GENERATION_CONFIG))
    return found


@contextmanager
def serving(*flags: str, change: Callable[[Path], object] | None = None, host: str = "127.0.0.1") -> Iterator[Served]:
    """With these flags, and all else as it is by default. change: of the model's folder; host: where HTTP is spoken."""
    http, cache, engine, metrics = free_ports(4)
    with short_folder() as folder, hub(str(folder / "hub")) as stand_in, (folder / "log").open("w") as log:
        model = snapshot(folder)
        if change is not None:
            change(model)
        command = [sys.executable, "-m", "kvkeeper.cli", "serve", str(model), "--json", "--pool-memory", "64MiB", *flags]
        command += ["--http", http.replace("127.0.0.1", host), "--cache-listen", cache, "--engine-listen", engine]
        if "--gateway" in flags:
            command += ["--gateway-prometheus-port", metrics.rpartition(":")[2]]
        process = subprocess.Popen(
            command,
            env=environment(folder) | stand_in.environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=log,
            text=True,
        )  # fmt: skip
        try:
            line = process.stdout.readline() if process.stdout else ""
            told = (folder / "log").read_text()
            assert line, told
            yield Served(json.loads(line), process, folder / "log", told, model, stand_in)
        finally:
            for _ in range(2 if "--gateway" in flags else 1):  # the second one ends it at once: the gateway waits for seconds
                process.send_signal(signal.SIGINT)
            process.communicate(timeout=END_S)
