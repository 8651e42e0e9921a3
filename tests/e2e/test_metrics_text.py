"""The text of a scrape: the meaning of each family, the model and the build; and that nothing else is served."""

import asyncio
import re
import urllib.error
import urllib.request
from dataclasses import replace
from pathlib import Path

import pytest
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from kvkeeper.cache.v1 import cache_service_pb2 as cache_pb
from kvkeeper.client import GenerateOptions, KvkeeperError
from kvkeeper.common.service import VERSION
from kvkeeper.engine.v1 import engine_service_pb2 as engine_pb
from kvkeeper.engine_service.loop.stats import BOUNDS, TOKEN_BOUNDS
from tests.support.models.odd_models import NAN_TOKEN, odd_model
from tests.support.processes.service_pair import GREEDY, Services, generate

ANY_PORT = "127.0.0.1:0"
PROTOS = Path(cache_pb.__file__).parents[3]


async def fetch(address: str, path: str = "/metrics") -> tuple[int, str]:
    def ask() -> tuple[int, str]:
        try:
            with urllib.request.urlopen(f"http://{address}{path}", timeout=10) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read().decode()

    return await asyncio.to_thread(ask)


async def families(address: str) -> dict[str, Metric]:
    _, text = await fetch(address)
    return {family.name: family for family in text_string_to_metric_families(text)}


def comments(path: str, message: str) -> dict[str, str]:
    """The comments of a message's fields in the .proto."""
    (body,) = re.findall(rf"^message {message} {{\n(.*?)^}}", (PROTOS / path).read_text(), re.MULTILINE | re.DOTALL)
    found = re.findall(r"((?:^ +//.*\n)+)^ +(?:optional |repeated )?(?:map<.*>|[\w.]+) (\w+) = ", body, re.MULTILINE)
    return {name: " ".join(text.replace("//", " ").split()) for text, name in found}


@pytest.fixture
async def addresses(world: Services) -> tuple[str, str]:
    """Metrics addresses of both services, after a request that ended well, one that was cut and one that failed."""
    cache = await world.start_cache(metrics_listen=ANY_PORT)
    engine = await world.start_engine(odd_model(), metrics_listen=ANY_PORT)
    client = await world.client(engine)
    await generate(client, [1, 2, 3], 8, n=2)
    with pytest.raises(KvkeeperError):
        await generate(client, [NAN_TOKEN])
    stopping = client.generate([5, 5], GenerateOptions(sampling=replace(GREEDY, max_tokens=150)))
    await anext(stopping)
    stopping.close()
    await world.wait_idle()
    assert cache.metrics is not None
    assert engine.metrics is not None
    return cache.metrics.address, engine.metrics.address


async def test_every_family_is_explained_by_the_comment_of_its_field(addresses: tuple[str, str]) -> None:
    cache, engine = [await families(address) for address in addresses]
    pool = comments("kvkeeper/cache/v1/cache_service.proto", "PoolStats")
    assert set(pool) == set(cache_pb.PoolStats.DESCRIPTOR.fields_by_name)
    for name, text in pool.items():
        if cache_pb.PoolStats.DESCRIPTOR.fields_by_name[name].message_type is None:  # parts have labels of their own
            assert cache[f"kvkeeper_cache_{name.removeprefix('num_')}"].documentation == text
    for name, text in comments("kvkeeper/cache/v1/cache_service.proto", "GroupStats").items():
        if name != "window_tokens":
            assert cache[f"kvkeeper_cache_group_{name.removeprefix('num_')}"].documentation == text
    told = 0
    for name, text in comments("kvkeeper/engine/v1/engine_service.proto", "GetStatsResponse").items():
        family = engine.get(f"kvkeeper_engine_{name.removeprefix('num_')}")
        if family is not None and name != "scheduling_policy":
            told += 1
            assert family.documentation == text
    assert told == 28
    assert set(engine_pb.GetStatsResponse.DESCRIPTOR.fields_by_name) == set(
        comments("kvkeeper/engine/v1/engine_service.proto", "GetStatsResponse")
    )
    for family in [*cache.values(), *engine.values()]:
        assert family.documentation, family.name
        assert not re.match(r"Of them|The latter|The most that they", family.documentation), "a HELP stands alone"


async def test_the_model_the_build_and_the_process_are_named(addresses: tuple[str, str]) -> None:
    cache, engine = [await families(address) for address in addresses]
    for name, family in engine.items():
        labels = [set(sample.labels) for sample in family.samples]
        if name.startswith("kvkeeper_engine_") and not name.startswith("kvkeeper_engine_build"):
            assert all("model" in own for own in labels), name
        elif name.startswith("gen_ai_"):
            assert all("gen_ai_request_model" in own for own in labels), name
    for told, prefix in ((cache, "kvkeeper_cache"), (engine, "kvkeeper_engine")):
        (build,) = told[f"{prefix}_build_info"].samples
        assert (build.labels["version"], build.value) == (VERSION, 1)
        assert told["process_resident_memory_bytes"].samples[0].value > 1 << 20
        assert told["process_cpu_seconds"].samples[0].value > 0
    (model,) = engine["kvkeeper_engine_model_info"].samples
    assert (model.labels["model"], model.labels["architecture"]) == ("hash-toy", "HashToy")


async def test_ended_requests_are_counted_by_why_and_measured_in_tokens(addresses: tuple[str, str]) -> None:
    engine = await families(addresses[1])
    ended = {sample.labels["finish_reason"]: sample.value for sample in engine["kvkeeper_engine_ended_requests"].samples}
    names = {name.removeprefix("FINISH_REASON_").lower() for name in engine_pb.FinishReason.keys()} - {"unspecified"}  # noqa: SIM118
    assert ended == dict.fromkeys(names, 0) | {"length": 1, "error": 1, "cancelled": 1}
    for name, least in (("prompt_length_tokens", 3 + 1 + 2), ("output_length_tokens", 16 + 1)):
        samples = engine[f"kvkeeper_engine_{name}"].samples
        by_bound = {sample.labels["le"]: sample.value for sample in samples if "le" in sample.labels}
        assert len(by_bound) == len(TOKEN_BOUNDS) + 1
        assert by_bound["+Inf"] == 3
        (total,) = [sample.value for sample in samples if sample.name.endswith("_sum")]
        assert total >= least


async def test_latencies_have_buckets_beyond_a_minute(addresses: tuple[str, str]) -> None:
    assert [bound for bound in BOUNDS if bound > 60] == [120, 300, 600, 1800]
    samples = (await families(addresses[1]))["kvkeeper_engine_request_duration_seconds"].samples
    assert {"120.0", "1800.0"} <= {sample.labels.get("le") for sample in samples}


async def test_only_one_path_has_metrics(addresses: tuple[str, str]) -> None:
    for address in addresses:
        for path in ("/", "/metric", "/metrics/x", "/favicon.ico", "/healthz"):
            status, text = await fetch(address, path)
            assert (status, text) == (404, "metrics are at /metrics\n")
        status, text = await fetch(address, "/metrics?")
        assert status == 200
        assert "process_cpu_seconds_total" in text
