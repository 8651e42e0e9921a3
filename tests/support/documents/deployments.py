"""The files that run the services somewhere, taken apart: which containers there are, and which command lines they are given.

Owns the merging of overlays, as compose and kustomize do it, for what our files use of it. Knows no flag of any program.
"""

import json
import re
import shlex
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tests.support.documents.markdown import ROOT

DOCKERFILE = ROOT / "deploy/container/Dockerfile"
COMPOSE = ROOT / "deploy/compose"
KUBERNETES = ROOT / "deploy/kubernetes"
UNITS = ROOT / "deploy/systemd"
OURS = "kvkeeper:"  # images that the Dockerfile makes
IMAGES = ("cpu", "cuda")
OVERLAYS = {"cpu": "", "cuda": "gpu", "gateway": "gateway"}  # by variant; folders of Kubernetes
VARIANTS = tuple(OVERLAYS)
Node = Any  # of YAML


@dataclass(frozen=True, slots=True)
class Container:
    """One of compose or of a pod. command: what it runs, the image's entrypoint included; paths: where something is mounted."""

    name: str
    command: list[str]
    others: list[list[str]]  # health checks, preStop
    paths: dict[str, str]  # mount path to what is mounted
    node: Node

    def flag(self, name: str) -> str:
        """The value of --name=value. Raises KeyError."""
        return dict(word.removeprefix("--").split("=", 1) for word in self.command if "=" in word)[name]


def instructions() -> list[tuple[str, str]]:
    """Of the Dockerfile: the word and the rest, lines joined."""
    text = re.sub(r"^\s*#.*\n", "", DOCKERFILE.read_text(), flags=re.MULTILINE)
    lines = text.replace("\\\n", " ").splitlines()
    return [(line.split()[0], line.partition(" ")[2].strip()) for line in lines if line.strip()]


def _listed(word: str) -> list[str]:
    """The words of the one instruction in the form of a list, after its own flags."""
    (rest,) = (rest for name, rest in instructions() if name == word)
    return list(json.loads(rest[rest.index("[") :]))


ENTRYPOINT = _listed("ENTRYPOINT")


def image(variant: str) -> str:
    """The name of its stage of the Dockerfile."""
    return variant if variant in IMAGES else "cpu"


def composed(variant: str) -> dict[str, Node]:
    """The compose file, with the one that goes over it for another variant."""
    base = yaml.safe_load((COMPOSE / "compose.yaml").read_text())
    return base if variant == "cpu" else _compose_over(base, yaml.safe_load((COMPOSE / f"compose.{variant}.yaml").read_text()))


def compose_containers(variant: str) -> dict[str, Container]:
    found = {}
    for name, node in composed(variant)["services"].items():
        entrypoint = node.get("entrypoint", ENTRYPOINT if node["image"].startswith(OURS) else [node["image"].split(":")[0]])
        test = node.get("healthcheck", {}).get("test")
        mounts = dict(reversed(volume.removesuffix(":ro").rsplit(":", 1)) for volume in node.get("volumes", []))
        mounts |= dict.fromkeys(node.get("tmpfs", []), "tmpfs")
        others = [test[1:]] if test else []
        found[name] = Container(name, [*entrypoint, *node.get("command", [])], others, mounts, node)
    return found


def manifests(variant: str) -> list[Node]:
    """What kustomize would hand to Kubernetes, by its files and our patches."""
    found = _resources(KUBERNETES)
    if variant == "cpu":
        return found
    folder = KUBERNETES / OVERLAYS[variant]
    overlay = yaml.safe_load((folder / "kustomization.yaml").read_text())
    found += [each for path in overlay["resources"] if path != ".." for each in _all_of(folder / path)]
    for patch in overlay["patches"]:
        (change,) = _all_of(folder / patch["path"])
        (place,) = (i for i, each in enumerate(found) if _identity(each) == _identity(change))
        found[place] = _kustomize_over(found[place], change)
    for changed in overlay.get("images", []):
        old, new = f"{changed['name']}:cpu", f"{changed['name']}:{changed['newTag']}"
        found = json.loads(json.dumps(found).replace(json.dumps(old), json.dumps(new)))
    return found


def one(kind: str, variant: str = "cpu") -> Node:
    """The one manifest of the kind."""
    (found,) = (each for each in manifests(variant) if each["kind"] == kind)
    return found


def pod(variant: str) -> Node:
    return one("Deployment", variant)["spec"]["template"]["spec"]


def pod_containers(variant: str) -> dict[str, Container]:
    found = {}
    for node in [*pod(variant)["initContainers"], *pod(variant)["containers"]]:
        stop = node.get("lifecycle", {}).get("preStop", {}).get("exec", {}).get("command")
        mounts = {mount["mountPath"]: mount["name"] for mount in node["volumeMounts"]}
        command = [*node.get("command", ENTRYPOINT), *node.get("args", [])]
        found[node["name"]] = Container(node["name"], command, [stop] if stop else [], mounts, node)
    return found


def command_lines() -> Iterator[tuple[str, list[str]]]:
    """Every command of ours that a file names: where, and its words. The units' settings are those of the checkout."""
    yield "Dockerfile CMD", [*ENTRYPOINT, *_listed("CMD")]
    yield "Dockerfile HEALTHCHECK", _listed("HEALTHCHECK")
    for variant in VARIANTS:
        for kind, containers in (("compose", compose_containers(variant)), ("kubernetes", pod_containers(variant))):
            for container in containers.values():
                if container.node["image"].startswith(OURS):
                    for command in (container.command, *container.others):
                        yield f"{kind} {variant} {container.name}", command
    for unit in sorted(UNITS.glob("*.service")):
        for line in re.findall(r"^ExecStart=/opt/kvkeeper/bin/(.*)$", unit.read_text(), re.MULTILINE):
            yield unit.name, shlex.split(line.replace("/etc/kvkeeper.toml", str(UNITS / "kvkeeper.toml")))


def _resources(folder: Path) -> list[Node]:
    names = yaml.safe_load((folder / "kustomization.yaml").read_text())["resources"]
    return [each for name in names for each in _all_of(folder / name)]


def _all_of(path: Path) -> list[Node]:
    return list(yaml.safe_load_all(path.read_text()))


def _identity(node: Node) -> tuple[str, str]:
    return node["kind"], node["metadata"]["name"]


def _compose_over(base: Node, over: Node) -> Node:
    """Mappings are merged, commands replaced, other lists joined."""
    if isinstance(base, dict) and isinstance(over, dict):
        merged = dict(base)
        for key, value in over.items():
            joins = key in base and isinstance(value, list) and key not in ("command", "entrypoint")
            merged[key] = [*base[key], *value] if joins else _compose_over(base.get(key), value)
        return merged
    return over


def _kustomize_over(base: Node, over: Node) -> Node:
    """Mappings are merged, lists of named or mounted things by name or path, other lists replaced."""
    if isinstance(base, dict) and isinstance(over, dict):
        return {**base, **{key: _kustomize_over(base.get(key), value) for key, value in over.items()}}
    key = next((key for key in ("mountPath", "name") if _are_keyed(base, key) and _are_keyed(over, key)), None)
    if key is None:
        return deepcopy(over)
    changes = {each[key]: each for each in over}
    merged = [_kustomize_over(each, changes.pop(each[key])) if each[key] in changes else each for each in base]
    return [*merged, *changes.values()]


def _are_keyed(node: Node, key: str) -> bool:
    return isinstance(node, list) and bool(node) and all(isinstance(each, dict) and key in each for each in node)
