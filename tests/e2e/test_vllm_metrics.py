"""Metrics under vLLM's names: only where asked for, with the numbers of ours; docs/operate/watch.md has the same table.

Also what holds for every metric: a help text, and a unit or the counted thing as the last word of its name.
"""

import re

import pytest

from kvkeeper.client import GenerateOptions, KvkeeperError, Sampling
from kvkeeper.engine_service.rpc.metrics import SAME
from tests.e2e.test_metrics_text import ANY_PORT, families
from tests.support.documents.markdown import ROOT
from tests.support.models.odd_models import NAN_TOKEN, odd_model
from tests.support.processes.service_pair import Services, generate

# The last word of a name. A sum's `_total` is Prometheus' own ending, and not part of a family's name here.
UNITS = {"seconds", "bytes", "fds", "info", "share", "rate", "utilization", "perc"}
COUNTED = {
    *(
        "blocks",
        "tokens",
        "requests",
        "sequences",
        "sessions",
        "steps",
        "starts",
        "ups",
        "hits",
        "misses",
        "forks",
        "write",
        "lines",
    ),
    *(
        "refusals",
        "outs",
        "ins",
        "transfers",
        "pins",
        "evictions",
        "logits",
        "tenants",
        "answers",
        "waits",
        "changes",
        "watches",
        "nodes",
        "offs",
    ),
    *(
        "pools",
        "results",
        "prefills",
        "entries",
        "fronts",
        "restarts",
        "preemptions",
        "switches",
        "guesses",
        "out",
        "loads",
        "rests",
        "calls",
    ),
}
LEVELS = {"pressure", "policy", "revision"}  # 1 to 4; 1 for the one in force; a number that grows


async def test_each_has_the_value_of_ours(world: Services) -> None:
    await world.start_cache()
    engine = await world.start_engine(odd_model(), metrics_listen=ANY_PORT, vllm_metrics=True)
    client = await world.client(engine)
    prompt = list(range(1, 10))
    for _ in range(2):
        await generate(client, prompt, 8)
    with pytest.raises(KvkeeperError):
        await generate(client, [NAN_TOKEN])
    stopped = client.generate([4, 5], GenerateOptions(sampling=Sampling(max_tokens=150)))
    await anext(stopped)
    stopped.close()
    await world.wait_idle()
    assert engine.metrics is not None
    told = await families(engine.metrics.address)
    theirs = {name: family for name, family in told.items() if name.startswith("vllm:")}
    assert set(theirs) == {same.name for same in SAME}
    for same in SAME:
        own = [told[f"kvkeeper_engine_{name}"] for name in same.own]
        assert theirs[same.name].type == own[0].type
        if same.name != "vllm:request_success":
            by_end: dict[tuple[str, str], float] = {}
            for family in own:
                for sample in family.samples:
                    key = sample.name.removeprefix(family.name), sample.labels.get("le", "")
                    by_end[key] = by_end.get(key, 0) + sample.value
            samples = theirs[same.name].samples
            assert {(s.name.removeprefix(same.name), s.labels.get("le", "")): s.value for s in samples} == by_end, same.name
        for sample in theirs[same.name].samples:
            assert (sample.labels["model_name"], sample.labels["engine"]) == ("hash-toy", "0")
    values = {name: [sample.value for sample in family.samples] for name, family in theirs.items()}
    assert values["vllm:prompt_tokens"] == values["vllm:prefix_cache_queries"] == [9 + 9 + 1 + 2]
    assert values["vllm:prefix_cache_hits"] == [8]
    assert values["vllm:num_requests_running"] == values["vllm:num_requests_waiting"] == [0]
    ends = {sample.labels["finished_reason"]: sample.value for sample in theirs["vllm:request_success"].samples}
    assert ends == {"stop": 0, "length": 2, "abort": 1, "error": 1}


async def test_every_metric_has_a_help_text_and_a_unit_and_vllm_s_names_are_not_told_unasked(world: Services) -> None:
    cache = await world.start_cache(metrics_listen=ANY_PORT)
    engine = await world.start_engine(metrics_listen=ANY_PORT)
    for service in (cache, engine):
        assert service.metrics is not None
        told = await families(service.metrics.address)
        assert [name for name, family in told.items() if not family.documentation] == []
        assert [name for name in told if name.rpartition("_")[2] not in UNITS | COUNTED | LEVELS] == []
        assert [name for name in told if name.startswith("vllm:")] == []
        for name, family in told.items():
            assert (family.type == "histogram") <= name.endswith(("_seconds", "_tokens")), name


def test_the_table_of_the_documents_is_that_of_the_code() -> None:
    page = (ROOT / "docs/operate/watch.md").read_text()
    rows = re.findall(r"^\| `(vllm:\w+)` \| (.*?) \|", page, re.MULTILINE)
    assert [(name, tuple(re.findall(r"`kvkeeper_engine_(\w+?)(?:_total)?`", own))) for name, own in rows] == [
        (same.name, same.own) for same in SAME
    ]
