"""The files of deploy/ for containers: valid by their schemas, with commands that exist, at one about ports and paths."""

import fnmatch
import json
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Mapping
from importlib import resources
from itertools import pairwise
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml

from kvkeeper.cache_service.config import SOURCE as CACHE
from kvkeeper.common.service.sizes import parse_size
from kvkeeper.engine_service.config import SOURCE as ENGINE
from tests.packaging.test_commands import Wrong, check
from tests.support.documents import deployments as files
from tests.support.documents.deployments import OURS, VARIANTS, Container
from tests.support.documents.markdown import ROOT

KUBERNETES_VERSION = "1.34"  # the first in which all that the manifests use is stable
_SERVICES = {"cache": "kvkeeper.cache.v1.CacheService", "engine": "kvkeeper.engine.v1.EngineService"}
_OWN_CHECK = (["sleep", "infinity"], ["mkdir"], ["python", "-c"])  # commands of the system, by how they begin
_UNITS = {"Ki": 1 << 10, "Mi": 1 << 20, "Gi": 1 << 30, "m": 1 << 20, "mb": 1 << 20}
_OF_THE_INDEX = 1.05  # of a pool, kept in files
ALL = [(kind, variant) for kind in ("compose", "kubernetes") for variant in VARIANTS]
each_deployment = pytest.mark.parametrize(("kind", "variant"), ALL)


def containers(kind: str, variant: str) -> dict[str, Container]:
    return files.compose_containers(variant) if kind == "compose" else files.pod_containers(variant)


def number_of_bytes(text: str) -> int:
    number, unit = re.fullmatch(r"(\d+)(\w+)", text).groups()  # type: ignore[union-attr]
    return int(number) * _UNITS[unit]


def port_of(address: str) -> int:
    return int(address.rpartition(":")[2])


# Schemas


@pytest.mark.parametrize("name", ["compose.yaml", "compose.cuda.yaml", "compose.gateway.yaml"])
def test_compose_files_keep_to_the_specification(name: str) -> None:
    vendored = resources.files("check_jsonschema") / "builtin_schemas/vendor/compose-spec.json"
    schema = json.loads(vendored.read_text())
    content = yaml.safe_load((files.COMPOSE / name).read_text())
    jsonschema.validate(content, schema)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({**content, "service": {}}, schema)


@pytest.mark.parametrize("variant", VARIANTS)
def test_manifests_keep_to_the_schemas_of_kubernetes(variant: str) -> None:
    found = files.manifests(variant)
    for manifest in found:
        kubernetes_validate.validate(manifest, KUBERNETES_VERSION, strict=True)
    assert len({(each["kind"], each["metadata"]["name"]) for each in found}) == len(found)


def test_a_field_that_kubernetes_does_not_know_is_found() -> None:
    deployment = files.one("Deployment")
    deployment["spec"]["template"]["spec"]["shareProcesses"] = True
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(deployment, KUBERNETES_VERSION, strict=True)


def test_a_linter_has_nothing_to_say_of_the_dockerfile() -> None:
    hadolint = str(Path(sys.executable).parent / "hadolint")
    done = subprocess.run([hadolint, "--no-color", str(files.DOCKERFILE)], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "")


# Commands


@pytest.mark.parametrize(("where", "words"), list(files.command_lines()))
def test_every_command_can_be_typed(where: str, words: list[str]) -> None:
    if not any(words[: len(begin)] == begin for begin in _OWN_CHECK):
        check(" ".join(f"'{word}'" for word in words))


def test_every_file_names_commands() -> None:
    named = {where.split()[0] for where, _ in files.command_lines()}
    units = {unit.name for unit in files.UNITS.glob("*.service")}
    assert named == {"Dockerfile", "compose", "kubernetes"} | units
    with pytest.raises(Wrong):
        check("kvkeeper cache --health-adress=0.0.0.0:1")


# Ports and addresses


def front_port(front: Container) -> int:
    """Where clients find it; it listens at all addresses of its network."""
    address = f"{front.flag('host')}:{front.flag('port')}" if front.command[0] == "smg" else front.flag("listen")
    assert address.startswith("0.0.0.0:")
    return port_of(address)


@each_deployment
def test_addresses_are_those_of_the_other_containers(kind: str, variant: str) -> None:
    found = containers(kind, variant)
    cache, engine, front = found["cache"], found["engine"], found["http"]
    assert engine.flag("cache") == cache.flag("listen")
    if variant == "gateway":
        assert front.flag("worker-urls") == f"grpc://{engine.flag('listen')}"
        assert front.flag("prometheus-host") == "127.0.0.1"
    else:
        assert front.flag("engine") == engine.flag("listen")
        assert "--trust-network" in front.command
    at = {"--cache": cache.flag("listen"), "--engine": engine.flag("listen"), "drain": engine.flag("listen")}
    for container in found.values():
        for command in container.others:
            for word, following in pairwise(command):
                if word in at:
                    assert following == at[word], command
    ports = [port_of(each.flag(name)) for each in (cache, engine) for name in ("metrics-listen", "health-address")]
    assert len({*ports, port_of(engine.flag("listen")), front_port(front)}) == 6


@each_deployment
def test_prometheus_looks_where_metrics_are(kind: str, variant: str) -> None:
    found = containers(kind, variant)
    mounted = files.compose_containers(variant)["prometheus"].paths["/etc/prometheus/prometheus.yaml"]
    jobs = yaml.safe_load((files.COMPOSE / mounted).read_text())["scrape_configs"]
    targets = {job["job_name"]: job["static_configs"][0]["targets"] for job in jobs}
    front, name = found["http"], "kvkeeper-gateway" if variant == "gateway" else "kvkeeper-http"
    port = front.flag("prometheus-port") if variant == "gateway" else front_port(front)
    assert targets == {
        "kvkeeper-cache": [found["cache"].flag("metrics-listen")],
        "kvkeeper-engine": [found["engine"].flag("metrics-listen")],
        name: [f"127.0.0.1:{port}"],
    }


@pytest.mark.parametrize("variant", VARIANTS)
def test_probes_ask_a_port_that_the_command_opens(variant: str) -> None:
    found = files.pod_containers(variant)
    for name, service in _SERVICES.items():
        node = found[name].node
        assert found[name].flag("health-address").startswith("0.0.0.0:"), "the kubelet asks at the pod's address"
        port = port_of(found[name].flag("health-address"))
        assert [each["containerPort"] for each in node["ports"]] == [port]
        probes = {kind: node[kind]["grpc"] for kind in ("startupProbe", "livenessProbe", "readinessProbe")}
        assert {probe["port"] for probe in probes.values()} == {port}
        assert probes["readinessProbe"]["service"] == service
        assert "service" not in probes["livenessProbe"], "a service that waits for another lives"
    front = found["http"].node
    assert [each["containerPort"] for each in front["ports"]] == [front_port(found["http"])]
    names = {each["name"] for node in files.pod(variant)["containers"] for each in node["ports"]}
    assert {front[kind]["httpGet"]["port"] for kind in ("livenessProbe", "readinessProbe")} <= names


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_service_leads_to_the_front_and_the_policy_lets_in_as_much(variant: str) -> None:
    labels = files.one("Deployment", variant)["spec"]["template"]["metadata"]["labels"]
    (port,) = files.one("Service", variant)["spec"]["ports"]
    front = files.pod_containers(variant)["http"]
    assert port["targetPort"] == front.node["ports"][0]["name"]
    (rule,) = files.one("NetworkPolicy", variant)["spec"]["ingress"]
    assert [each["port"] for each in rule["ports"]] == [front_port(front)]
    for kind, path in (("Deployment", "selector"), ("PodDisruptionBudget", "selector"), ("NetworkPolicy", "podSelector")):
        assert files.one(kind, variant)["spec"][path]["matchLabels"].items() <= labels.items()
    assert files.one("Service", variant)["spec"]["selector"].items() <= labels.items()
    assert files.pod(variant)["serviceAccountName"] == files.one("ServiceAccount", variant)["metadata"]["name"]


@pytest.mark.parametrize("variant", VARIANTS)
def test_compose_opens_to_the_host_alone_and_grafana_finds_prometheus(variant: str) -> None:
    services = files.composed(variant)["services"]
    published = {name: node["ports"] for name, node in services.items() if "ports" in node}
    assert all(port.startswith("127.0.0.1:") for ports in published.values() for port in ports)
    found = files.compose_containers(variant)
    assert published["node"] == [f"127.0.0.1:8000:{front_port(found['http'])}"], "its network is the front's"
    source = yaml.safe_load((files.COMPOSE / "grafana/source.yaml").read_text())["datasources"][0]
    assert source["url"] == f"http://node:{port_of(found['prometheus'].flag('web.listen-address'))}"
    (provider,) = yaml.safe_load((files.COMPOSE / "grafana/dashboards.yaml").read_text())["providers"]
    mounted = dict(found["grafana"].paths)
    (dashboard,) = (path for path, what in mounted.items() if what.endswith("dashboard.json"))
    assert Path(dashboard).parent == Path(provider["options"]["path"])
    for name in ("cache", "engine", "http", "prometheus"):
        assert services[name]["network_mode"] == "service:node"
    assert {services[name]["pid"] for name in ("cache", "engine")} == {"service:node"}


# Paths, users, images


@each_deployment
def test_every_path_of_a_command_is_mounted(kind: str, variant: str) -> None:
    found = containers(kind, variant)
    for container in found.values():
        if not container.node["image"].startswith(OURS):
            continue
        words = [word.rpartition("=")[2].removeprefix("unix:") for word in container.command]
        for path in (word for word in words if word.startswith("/")):
            assert any(Path(path).is_relative_to(mounted) for mounted in container.paths), f"{container.name}: {path}"
    socket = found["cache"].flag("listen").removeprefix("unix:")
    shared = [next(what for at, what in found[name].paths.items() if socket.startswith(at)) for name in ("cache", "engine")]
    assert shared[0] == shared[1], "the engine reaches the cache service by a socket in one volume"


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_file_that_compose_mounts_is_there(variant: str) -> None:
    named = [what for each in files.compose_containers(variant).values() for what in each.paths.values()]
    ours = [what for what in named if what.startswith(".")]
    assert len(ours) >= 5
    assert [what for what in ours if not (files.COMPOSE / what).is_file()] == []
    volumes = {what for what in named if re.fullmatch(r"[a-z]+", what)} - {"tmpfs"}
    assert volumes == set(files.composed(variant)["volumes"])


def test_all_run_as_the_user_of_the_image() -> None:
    (number,) = {re.search(r"--uid (\d+)", rest).group(1) for _, rest in files.instructions() if "useradd" in rest}  # type: ignore[union-attr]
    users = [rest for word, rest in files.instructions() if word == "USER"]
    assert users == [f"{number}:{number}", "0:0", f"{number}:{number}"], "root between the other two alone, for apt"
    for variant in VARIANTS:
        rules = files.pod(variant)["securityContext"]
        assert rules["runAsNonRoot"] is True
        assert {str(rules[key]) for key in ("runAsUser", "runAsGroup", "fsGroup")} == {number}
        options = [each["driver_opts"]["o"] for each in files.composed(variant)["volumes"].values() if each]
        assert len(options) == 2
        assert all(f"uid={number}" in option and "mode=0700" in option for option in options)


@each_deployment
def test_no_container_may_do_more_than_it_needs(kind: str, variant: str) -> None:
    for container in containers(kind, variant).values():
        node = container.node
        if kind == "kubernetes":
            rules = node["securityContext"]
            assert (rules["allowPrivilegeEscalation"], rules["readOnlyRootFilesystem"]) == (False, True)
            assert rules["capabilities"] == {"drop": ["ALL"]}
        elif node["image"].startswith(OURS):
            assert (node["read_only"], node["cap_drop"]) == (True, ["ALL"])
            assert "no-new-privileges:true" in node["security_opt"]
    if kind == "kubernetes":
        assert files.pod(variant)["automountServiceAccountToken"] is False
        assert not {"hostIPC", "hostPID", "hostNetwork"} & files.pod(variant).keys()


@each_deployment
def test_every_image_is_a_stage_of_the_dockerfile(kind: str, variant: str) -> None:
    stages = {rest.split()[-1] for word, rest in files.instructions() if word == "FROM"}
    ours = {each.node["image"] for each in containers(kind, variant).values() if each.node["image"].startswith(OURS)}
    assert ours == {f"{OURS}{files.image(variant)}"}
    assert files.image(variant) in stages
    if kind == "compose":
        build = files.composed(variant)["services"]["node"]["build"]
        assert build["target"] == files.image(variant)
        assert (files.COMPOSE / build["context"]).resolve() == ROOT
        assert ROOT / build["dockerfile"] == files.DOCKERFILE


def test_the_image_pins_torch_as_the_constraints_do_and_has_no_secret() -> None:
    text = files.DOCKERFILE.read_text()
    (torch,) = re.findall(r"^torch==\S+$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert set(re.findall(r"\btorch==\S+", text)) == {torch}
    assert all("-c constraints.txt" in line for line in re.findall(r"/pip install .*", text))
    extras = {name for group in re.findall(r"\}\[([\w,]+)\]", text) for name in group.split(",")}
    assert extras <= set(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"])
    assert not re.search(r"(?i)\b(ARG|ENV)\b[^\n]*(token|secret|password|key)", text)


@pytest.mark.parametrize("variant", files.IMAGES)
def test_a_change_of_the_sources_leaves_the_layer_of_torch_as_it_is(variant: str) -> None:
    stages: dict[str, list[str]] = {}
    for word, rest in files.instructions():
        if word == "FROM":
            base, _, name = rest.split()
            stages[name] = list(stages.get(base, []))
        else:
            stages[name].append(f"{word} {rest}")
    packages = stages[f"{variant}-packages"]
    torch = next(at for at, line in enumerate(packages) if "torch==" in line)
    copied = [line for line in packages[:torch] if line.startswith(("COPY", "ADD"))]
    assert copied == ["COPY constraints.txt ."]
    assert any("COPY --from=wheel" in line for line in packages[torch:])


@pytest.mark.parametrize("unit", sorted(path.name for path in files.UNITS.glob("*.service")))
def test_a_unit_leaves_little_exposed(unit: str) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not installed")
    command = ["systemd-analyze", "security", "--offline=true", "--no-pager", "--threshold=30", str(files.UNITS / unit)]
    judged = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert judged.returncode == 0, judged.stdout[-400:] + judged.stderr


# What the build sees


def is_sent(path: str) -> bool:
    """Whether a file of the checkout is part of the build's context: the last pattern that fits decides."""
    sent = True
    for line in (files.DOCKERFILE.parent / "Dockerfile.dockerignore").read_text().splitlines():
        pattern = line.strip().removeprefix("!")
        if not pattern or pattern.startswith("#"):
            continue
        parts = path.split("/")
        if any(_fits("/".join(parts[: end + 1]), pattern) for end in range(len(parts))):
            sent = line.startswith("!")
    return sent


def _fits(path: str, pattern: str) -> bool:
    if pattern.startswith("**/"):
        return fnmatch.fnmatch(path.rpartition("/")[2], pattern[3:])
    return path.count("/") == pattern.count("/") and fnmatch.fnmatch(path, pattern)


def test_the_build_sees_the_sources_of_the_wheel_and_nothing_else() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    links = [path for path in (ROOT / "clients" / "python" / "kvkeeper").iterdir() if path.is_symlink()]
    folders = {str(path.resolve().relative_to(ROOT)) for path in links} | {
        "protos/kvkeeper/cache/v1",
        "clients/python/kvkeeper/client",
    }
    assert "common" in folders
    needed = {f"{folder}/x.py" for folder in folders} | {"pyproject.toml", "constraints.txt"}
    needed |= {settings["project"]["readme"], *settings["project"]["license-files"], "protos/build_backend.py"}
    assert {path for path in needed if not is_sent(path)} == set()
    others = {".git/config", ".venv/bin/python", "tests/gpu/checks.py", "docs/api/api.md", "clients/node/index.js", ".env"}
    others |= {"deploy/compose/compose.yaml", "cache_service/__pycache__/a.pyc", "protos/kvkeeper/cache/v1/a_pb2.py"}
    assert [path for path in others if is_sent(path)] == []


# Sizes and times


def configs(found: Mapping[str, Container]) -> tuple[Any, Any]:
    return CACHE.load(found["cache"].command[2:], {}), ENGINE.load(found["engine"].command[2:], {})


@each_deployment
def test_memory_is_large_enough_for_the_pools(kind: str, variant: str) -> None:
    found = containers(kind, variant)
    config, _ = configs(found)
    if variant == "cuda":
        assert config.memory_dir is None, "the pool is on the device"
        return
    pools = config.num_pools * (config.pool_memory + config.host_memory) * _OF_THE_INDEX
    if kind == "compose":
        size = re.search(r"size=(\w+)", files.composed(variant)["volumes"]["memory"]["driver_opts"]["o"])
        assert size is not None
        assert number_of_bytes(size.group(1)) > pools
        return
    volumes = {each["name"]: each for each in files.pod(variant)["volumes"]}
    assert number_of_bytes(volumes["memory"]["emptyDir"]["sizeLimit"]) > pools
    assert volumes["memory"]["emptyDir"]["medium"] == "Memory"
    assert number_of_bytes(found["cache"].node["resources"]["limits"]["memory"]) > pools + parse_size("300MiB")


@each_deployment
def test_the_engine_drains_first_and_nothing_is_killed_while_it_does(kind: str, variant: str) -> None:
    found = containers(kind, variant)
    cache, engine = configs(found)
    assert cache.drain_timeout > engine.drain_timeout
    if kind == "compose":
        for name, drain_s in (("cache", cache.drain_timeout), ("engine", engine.drain_timeout)):
            assert int(found[name].node["stop_grace_period"].removesuffix("s")) > drain_s
        return
    waits = {name: float(found[name].others[0][-1]) for name in ("engine", "http")}
    assert engine.drain_timeout < waits["engine"] < waits["http"] < files.pod(variant)["terminationGracePeriodSeconds"]
    assert cache.drain_timeout < files.pod(variant)["terminationGracePeriodSeconds"]
    assert ["--only-wait" in found[name].others[0] for name in ("engine", "http")] == [False, True], "one of them asks"
