"""A pod without Kubernetes: its containers by the manifest's command lines, probes as the kubelet asks, and preStop.

Paths, ports and the size of the pool are replaced by those of the test; every flag stays.
"""

import asyncio
import json
import os
import re
import sys
import tempfile
import urllib.request
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvkeeper.client import AsyncEngineClient, CallOptions, GenerateOptions, KvkeeperError, Sampling
from tests.support.documents.deployments import Container, pod_containers
from tests.support.processes.fleet import DEADLINE_S as START_S
from tests.support.processes.fleet import Service
from tests.support.processes.service_pair import DEADLINE_S, until
from tests.support.processes.services import environment, free_ports, short_folder

SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING
_POOL = "--pool-memory=64MiB"


@dataclass
class Pod:
    """Its running containers by name, and what the test has in the place of the manifest's addresses and paths."""

    folder: Path
    changes: Mapping[str, str]
    fronts: Mapping[str, str]  # addresses by container
    running: dict[str, Service]

    def words(self, words: list[str]) -> list[str]:
        """A command of the manifest, as the test runs it."""
        text = "\n".join(words)
        for old, new in self.changes.items():
            text = text.replace(old, new)
        text = re.sub("--pool-memory=.*", _POOL, text)
        name, *rest = text.split("\n")
        return [sys.executable, "-P", "-m", {"kvkeeper": "kvkeeper.cli", "smg": "smg"}[name], *rest]

    async def start(self, container: Container) -> Service:
        process = await asyncio.create_subprocess_exec(
            *self.words(container.command), env=environment(self.folder), stdin=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip
        service = self.running[container.name] = Service(process)
        if container.name not in self.fronts:
            await service.until("ready")
        return service

    async def probe(self, container: Container, kind: str) -> int:
        """The status that the kubelet would get: at the pod's address, without credentials."""
        asked = container.node[kind]["grpc"]
        address = self.changes[f"0.0.0.0:{asked['port']}"]
        async with grpc.aio.insecure_channel(address) as channel:
            request = health_pb2.HealthCheckRequest(service=asked.get("service", ""))
            return (await health_pb2_grpc.HealthStub(channel).Check(request, timeout=DEADLINE_S)).status

    async def http_probe(self, container: Container, kind: str) -> bool:
        """Whether the kubelet would get an answer that is no error."""

        def ask() -> bool:
            try:
                with urllib.request.urlopen(f"http://{self.fronts[container.name]}{path}", timeout=DEADLINE_S) as answer:
                    return bool(answer.status < 400)
            except OSError:
                return False

        path = container.node[kind]["httpGet"]["path"]
        return await asyncio.to_thread(ask)


def tokenized_by(http: str, path: str) -> list[int]:
    """What a front makes of a text."""
    with urllib.request.urlopen(f"http://{http}/v1/models", timeout=DEADLINE_S) as answer:
        (model,) = json.load(answer)["data"]
    body = json.dumps({"model": model["id"], "prompt": "def"}).encode()
    request = urllib.request.Request(f"http://{http}{path}", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=DEADLINE_S) as answer:
        return list(json.load(answer)["tokens"])


@pytest.fixture
async def pod() -> AsyncIterator[Pod]:
    async with pod_in_a_folder() as made:
        yield made


@asynccontextmanager
async def pod_in_a_folder() -> AsyncIterator[Pod]:
    health_of_cache, health_of_engine = free_ports()
    listen, metrics_of_cache = free_ports()
    metrics_of_engine, http = free_ports()
    metrics_of_gateway, gateway = free_ports()
    with short_folder() as folder, tempfile.TemporaryDirectory(dir="/dev/shm") as memory:
        (folder / "sockets").mkdir(mode=0o777)
        changes = {
            "/run/kvkeeper": f"{folder}/sockets",
            "/memory": memory,
            "0.0.0.0:7420": health_of_cache,
            "0.0.0.0:7421": health_of_engine,
            "127.0.0.1:7411": listen,
            "127.0.0.1:9410": metrics_of_cache,
            "127.0.0.1:9411": metrics_of_engine,
            "--host=0.0.0.0": "--host=127.0.0.1",
            "--port=8000": f"--port={gateway.rpartition(':')[2]}",
            "0.0.0.0:8000": http.replace("127.0.0.1", "0.0.0.0"),
            "--prometheus-port=29000": f"--prometheus-port={metrics_of_gateway.rpartition(':')[2]}",
        }
        made = Pod(folder, changes, {"http": http, "gateway": gateway}, {})
        try:
            yield made
        finally:
            for service in made.running.values():
                if service.process.returncode is None:
                    service.process.kill()
                await service.end()


async def test_the_manifest_s_services_start_are_probed_and_drain(pod: Pod) -> None:
    containers = pod_containers("cpu")
    cache, engine = containers["cache"], containers["engine"]
    folder = containers["folder"].command
    assert folder[0] == "mkdir"
    made = await asyncio.create_subprocess_exec(*[word.replace("/run/kvkeeper", f"{pod.folder}/sockets") for word in folder])
    assert await made.wait() == 0
    await pod.start(cache)
    await pod.start(engine)
    for container in (cache, engine):
        for kind in ("startupProbe", "livenessProbe", "readinessProbe"):
            assert await pod.probe(container, kind) == SERVING, (container.name, kind)

    front, gateway = containers["http"], replace(pod_containers("gateway")["http"], name="gateway")
    for each, path in ((front, "/tokenize"), (gateway, "/v1/tokenize")):
        await pod.start(each)
        for kind in ("livenessProbe", "readinessProbe"):
            async with asyncio.timeout(START_S):
                while not await pod.http_probe(each, kind):
                    pass
        assert await asyncio.to_thread(tokenized_by, pod.fronts[each.name], path), "what is ready has the tokenizer"

    async with AsyncEngineClient(pod.changes["127.0.0.1:7411"], CallOptions(retry_s=0)) as client:
        options = GenerateOptions(sampling=Sampling(max_tokens=1000, temperature=0))
        stream = client.generate("def fibonacci(n):", options)
        chunks = [await anext(stream)]
        stop = await asyncio.create_subprocess_exec(*pod.words(engine.others[0]), env=environment(pod.folder))

        async def is_draining() -> bool:
            return await pod.probe(engine, "livenessProbe") == NOT_SERVING

        await until(is_draining)
        with pytest.raises(KvkeeperError, match="DRAINING"):
            await client.submit("def", options)
        waiting = await asyncio.create_subprocess_exec(*pod.words(front.others[0]), env=environment(pod.folder))
        chunks += [chunk async for chunk in stream]
    assert chunks[-1].finish_reason is not None, "what ran has gone on to its end"
    assert sum(len(chunk.token_ids) for chunk in chunks) == 1000
    async with asyncio.timeout(DEADLINE_S):
        assert await stop.wait() == 0
        assert await waiting.wait() == 0
    assert await pod.running["engine"].end() == 0

    with pytest.raises((KvkeeperError, grpc.RpcError)):
        await pod.probe(engine, "livenessProbe")
    assert await pod.probe(cache, "readinessProbe") == SERVING
    pod.running["cache"].terminate()
    assert await pod.running["cache"].end() == 0
    assert os.listdir(pod.changes["/memory"]) == ["pools"], "--keep: the next container goes on with it"
