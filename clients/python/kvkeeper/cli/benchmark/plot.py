"""Draws hit rates by capacity and by tier. Needs matplotlib, which is the extra `plot`."""

import importlib.util
import os
from pathlib import Path
from typing import TYPE_CHECKING

from kvkeeper.cli.console.problems import UsageFailure
from kvkeeper.common.service.extras import install_command

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

OPTIMUM = "optimum"

Curves = dict[str, list[tuple[int, float]]]  # by policy: capacity in blocks, hit rate


def require() -> None:
    """Raises UsageFailure with the command that installs the missing packages."""
    if importlib.util.find_spec("matplotlib") is None:
        raise UsageFailure(f"--plot needs matplotlib: {install_command('plot')}")


def draw(curves: Curves, title: str, path: Path) -> None:
    """Writes a PNG, whole or not at all. Raises UsageFailure when it cannot be written."""
    from matplotlib.ticker import LogLocator, NullFormatter, PercentFormatter, StrMethodFormatter

    figure, axes = _subplots((8, 4.5))
    for policy, points in curves.items():
        style = {"color": "black", "linestyle": "--"} if policy == OPTIMUM else {"marker": "o", "markersize": 4}
        axes.plot([blocks for blocks, _ in points], [rate for _, rate in points], label=policy, **style)
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(10, subs=(1, 2, 5)))
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    axes.set(xlabel="capacity in blocks", ylabel="hit rate", title=title, ylim=(0, None))
    axes.grid(alpha=0.3)
    figure.legend(loc="outside right upper", frameon=False)
    _write(figure, path)


def draw_quality(curves: Curves, title: str, path: Path) -> None:
    """curves: by way of storing, length of the context and percent of perplexity. Writes a PNG as `draw` does."""
    from matplotlib.ticker import PercentFormatter

    figure, axes = _subplots((8, 4))
    for way, points in curves.items():
        axes.plot([length for length, _ in points], [percent for _, percent in points], label=way, marker="o", markersize=4)
    axes.axhline(0, color="black", linestyle="--", linewidth=1)
    axes.set_yscale("symlog", linthresh=0.1)
    axes.yaxis.set_major_formatter(PercentFormatter(100, decimals=2))
    axes.set(xlabel="tokens of context", ylabel="perplexity against exact", title=title)
    axes.grid(alpha=0.3)
    figure.legend(loc="outside right upper", frameon=False)
    _write(figure, path)


def draw_tiers(shares: dict[str, dict[str, float]], infinite: float, title: str, path: Path) -> None:
    """shares: hit rate by tier, of each set of tiers. Writes a PNG as `draw` does."""
    from matplotlib.ticker import PercentFormatter

    figure, axes = _subplots((8, 3.5))
    left = dict.fromkeys(shares, 0.0)
    for tier in dict.fromkeys(tier for rates in shares.values() for tier in rates):
        widths = {name: rates.get(tier, 0.0) for name, rates in shares.items()}
        axes.barh(list(shares), list(widths.values()), left=list(left.values()), label=f"hit in {tier}")
        left = {name: left[name] + width for name, width in widths.items()}
    axes.axvline(infinite, color="black", linestyle="--", label="an infinite cache")
    axes.xaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    axes.set(xlabel="share of the blocks asked for", title=title)
    axes.invert_yaxis()
    figure.legend(loc="outside lower center", ncols=4, frameon=False)
    _write(figure, path)


def _subplots(inches: tuple[float, float]) -> "tuple[Figure, Axes]":
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot.subplots(figsize=inches, layout="constrained")


def _write(figure: "Figure", path: Path) -> None:
    from matplotlib import pyplot

    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        figure.savefig(unfinished, format="png", dpi=100)
        unfinished.replace(path)
    except OSError as error:
        raise UsageFailure(f"{path} cannot be written: {error.strerror}") from None
    finally:
        unfinished.unlink(missing_ok=True)
        pyplot.close(figure)
