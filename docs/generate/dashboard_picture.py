"""`python -m docs.generate.dashboard_picture PROMETHEUS PICTURE MINUTES`: the dashboard's panels as a picture, without Grafana.

Each open panel of deploy/monitoring/dashboard.json is drawn where it stands there, from what the Prometheus server at
PROMETHEUS (http://127.0.0.1:9090) returns to the panel's own queries about the last MINUTES.
"""

import json
import math
import re
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlencode
from urllib.request import urlopen

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

mpl.use("agg")

_DASHBOARD = Path(__file__).parents[2] / "deploy/monitoring/dashboard.json"
_COLUMNS, _INCHES = 24, 0.62  # of Grafana's grid; a row of it is a third as high
_NUM_POINTS = 240
_UNITS = {"s": (1e3, "ms"), "bytes": (1 / (1 << 20), "MiB"), "percentunit": (100.0, "%")}


def picture(prometheus: str, minutes: float) -> Figure:
    """Raises OSError where the server does not answer."""
    panels = [panel for panel in json.loads(_DASHBOARD.read_text())["panels"] if panel["type"] != "row"]
    places = [panel["gridPos"] for panel in panels]
    num_rows = max(place["y"] + place["h"] for place in places)
    figure = Figure(figsize=(_COLUMNS * _INCHES, num_rows * _INCHES / 2), layout="constrained")
    grid = figure.add_gridspec(num_rows, _COLUMNS)
    for panel, place in zip(panels, places, strict=True):
        rows, columns = slice(place["y"], place["y"] + place["h"]), slice(place["x"], place["x"] + place["w"])
        _draw(figure.add_subplot(grid[rows, columns]), panel, prometheus, minutes)
    return figure


def _draw(axes: Axes, panel: Mapping[str, Any], prometheus: str, minutes: float) -> None:
    factor, unit = _UNITS.get(panel.get("fieldConfig", {}).get("defaults", {}).get("unit", ""), (1.0, ""))
    now = time.time()
    for target in panel["targets"]:
        for series in _series(prometheus, target["expr"], now - 60 * minutes, now):
            points = [((float(at) - now) / 60, factor * float(value)) for at, value in series["values"]]
            points = [point for point in points if math.isfinite(point[1])]
            axes.plot(*zip(*points, strict=True), label=_legend(target["legendFormat"], series["metric"]), linewidth=1.3)
    axes.set_title(f"{panel['title']}{f', {unit}' if unit else ''}", fontsize=10, loc="left")
    axes.set_ylim(bottom=0)
    axes.set_xlim(-minutes, 0)
    axes.tick_params(labelsize=7)
    axes.grid(alpha=0.3)
    if axes.lines:
        axes.legend(fontsize=7, loc="best", framealpha=0.6)
    else:
        axes.text(0.5, 0.5, "nothing of it happened", transform=axes.transAxes, ha="center", fontsize=8, color="gray")


def _series(prometheus: str, query: str, begin: float, end: float) -> list[dict[str, Any]]:
    step = (end - begin) / _NUM_POINTS
    query = query.replace("$model", ".*").replace("$__rate_interval", "15s")
    asked = urlencode({"query": query, "start": begin, "end": end, "step": step})
    with urlopen(f"{prometheus}/api/v1/query_range?{asked}", timeout=10) as answer:
        found: list[dict[str, Any]] = json.load(answer)["data"]["result"]
    return [series for series in found if any(math.isfinite(float(value)) for _, value in series["values"])]


def _legend(form: str, labels: Mapping[str, str]) -> str:
    return re.sub(r"\{\{(\w+)\}\}", lambda name: labels.get(name[1], ""), form)


if __name__ == "__main__":
    picture(sys.argv[1], float(sys.argv[3])).savefig(sys.argv[2], dpi=90)
