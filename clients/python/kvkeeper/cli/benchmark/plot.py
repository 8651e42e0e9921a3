"""Draws hit rate by capacity. Needs matplotlib, which is the extra `plot`."""

import importlib.util
import os
from pathlib import Path

from kvkeeper.cli.console.problems import UsageFailure
from kvkeeper.service.extras import install_command

OPTIMUM = "optimum"

Curves = dict[str, list[tuple[int, float]]]  # by policy: capacity in blocks, hit rate


def require() -> None:
    """Raises UsageFailure with the command that installs the missing packages."""
    if importlib.util.find_spec("matplotlib") is None:
        raise UsageFailure(f"--plot needs matplotlib: {install_command('plot')}")


def draw(curves: Curves, title: str, path: Path) -> None:
    """Writes a PNG, whole or not at all. Raises UsageFailure when it cannot be written."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.ticker import LogLocator, NullFormatter, PercentFormatter, StrMethodFormatter

    figure, axes = pyplot.subplots(figsize=(8, 4.5), layout="constrained")
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
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        figure.savefig(unfinished, format="png", dpi=100)
        unfinished.replace(path)
    except OSError as error:
        raise UsageFailure(f"{path} cannot be written: {error.strerror}") from None
    finally:
        unfinished.unlink(missing_ok=True)
        pyplot.close(figure)
