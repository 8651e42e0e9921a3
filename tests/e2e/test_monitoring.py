"""What operators are given to watch with names metrics that exist, in queries that Prometheus takes."""

import asyncio
import importlib
import json
import re
import tomllib
import urllib.request
from collections.abc import Iterator
from typing import Any

import promql_parser
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from tests.support.documents.markdown import ROOT
from tests.support.processes.service_pair import Services, generate

FOLDER = ROOT / "deploy" / "monitoring"
OF_PROMETHEUS = {"up"}  # made by the scrape itself
ANY_PORT = "127.0.0.1:0"
_OWN = re.compile(r"\b(?:kvkeeper|gen_ai|process)_\w+\b")


def alerts() -> list[dict[str, str]]:
    (group,) = yaml.safe_load((FOLDER / "alerts.yaml").read_text())["groups"]
    return list(group["rules"])


def open_panels() -> list[dict[str, Any]]:
    """What the dashboard shows at first."""
    return [panel for panel in json.loads((FOLDER / "dashboard.json").read_text())["panels"] if panel["type"] != "row"]


def rows() -> list[dict[str, Any]]:
    """Its folded rows."""
    return [panel for panel in json.loads((FOLDER / "dashboard.json").read_text())["panels"] if panel["type"] == "row"]


def queries() -> Iterator[tuple[str, str]]:
    """Of alerts and dashboard: a name, and the expression."""
    for rule in alerts():
        yield rule["alert"], rule["expr"]
    for panel in [*open_panels(), *(panel for row in rows() for panel in row["panels"])]:
        for target in panel["targets"]:
            # What Grafana fills in.
            yield panel["title"], target["expr"].replace("$__rate_interval", "1m").replace("$model", ".*")


async def samples(world: Services) -> set[str]:
    """The names of all samples of both services, after a request."""
    cache = await world.start_cache(metrics_listen=ANY_PORT)
    engine = await world.start_engine(metrics_listen=ANY_PORT)
    await generate(await world.client(engine), [1, 2, 3, 4, 5])
    assert cache.metrics is not None
    assert engine.metrics is not None

    def scrape(address: str) -> str:
        with urllib.request.urlopen(f"http://{address}/metrics", timeout=10) as answer:
            return str(answer.read().decode())

    texts = [await asyncio.to_thread(scrape, of.metrics.address) for of in (cache, engine)]
    families = (family for text in texts for family in text_string_to_metric_families(text))
    return {sample.name for family in families for sample in family.samples}


async def test_every_metric_that_is_watched_exists(world: Services) -> None:
    known = await samples(world) | OF_PROMETHEUS
    named = {name for _, query in queries() for name in _OWN.findall(query)}
    assert named - known == set()
    assert len(named) > 30


@pytest.mark.parametrize(("name", "query"), list(queries()))
def test_every_query_can_be_parsed(name: str, query: str) -> None:
    promql_parser.parse(query)


def test_a_query_with_a_mistake_is_found() -> None:
    with pytest.raises(ValueError, match=r"unclosed|unexpected|invalid"):
        promql_parser.parse("sum(rate(kvkeeper_engine_new_tokens_total[1m])")


def test_every_alert_says_what_is_the_matter_and_what_to_do() -> None:
    names = [rule["alert"] for rule in alerts()]
    assert len(set(names)) == len(names)
    for rule in alerts():
        assert rule["labels"].keys() == {"severity"}, rule["alert"]
        assert rule["annotations"].keys() == {"summary", "mend"}, rule["alert"]


def test_panels_lie_beside_each_other() -> None:
    folded = [panel for row in rows() for panel in row["panels"]]
    places = [tuple(panel["gridPos"].values()) for panel in (*open_panels(), *folded)]
    assert len(set(places)) == len(places)
    assert all(x + width <= 24 for _, width, x, _ in places)


def test_six_panels_are_open_and_each_says_what_to_do() -> None:
    assert len(open_panels()) == 6
    assert all(len(panel["description"]) > 60 for panel in open_panels())
    assert [row["collapsed"] for row in rows()] == [True]


def test_what_is_scraped_is_where_the_units_serve_it() -> None:
    """The file of settings beside the systemd units, and the scrape configuration."""
    settings = tomllib.loads((ROOT / "deploy/systemd/kvkeeper.toml").read_text())
    jobs = yaml.safe_load((FOLDER / "prometheus.yaml").read_text())["scrape_configs"]
    targets = {job["job_name"]: job["static_configs"][0]["targets"] for job in jobs}
    for name in ("cache", "engine"):
        assert targets[f"kvkeeper-{name}"] == [settings[name]["metrics-listen"]]
    rules = yaml.safe_load((FOLDER / "prometheus.yaml").read_text())["rule_files"]
    assert all((FOLDER / rule).is_file() for rule in rules)


@pytest.mark.parametrize("name", ["cache", "engine"])
def test_the_units_start_a_service_that_exists_with_settings_that_it_takes(name: str) -> None:
    unit = (ROOT / f"deploy/systemd/kvkeeper-{name}.service").read_text()
    (command,) = re.findall(r"^ExecStart=/opt/kvkeeper/bin/kvkeeper (\w+) --config /etc/kvkeeper.toml$", unit, re.MULTILINE)
    assert command == name
    source = importlib.import_module(f"kvkeeper.{name}_service.config").SOURCE
    config = source.load(["--config", str(ROOT / "deploy/systemd/kvkeeper.toml")], {})
    (stop_s,) = re.findall(r"^TimeoutStopSec=(\d+)$", unit, re.MULTILINE)
    assert int(stop_s) > config.drain_timeout, "the service ends by itself first"
