"""PNG files of the same charts, by matplotlib where it is installed (an optional extra)."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pagedcli.bench.figures import COLOURS, Chart

MISSING = ("PNG plots left out: matplotlib is not installed (pip install 'pagedcli[plots]'); "
           "the HTML page has every chart")


def available() -> bool:
    """Whether plots can be drawn here."""
    return importlib.util.find_spec("matplotlib") is not None


def write_plots(charts: Sequence[Chart], folder: Path, caption: str = "") -> list[Path]:
    """One PNG a chart, named by its key; `caption` (such as "synthetic lengths") stands below each."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for chart in charts:
        bars = chart.kind == "bars"
        height = 1.7 + 0.45 * len(chart.categories) if bars else 4.2
        figure = Figure(figsize=(7.2, height), layout="constrained", dpi=120)
        FigureCanvasAgg(figure)
        axes = figure.add_subplot()
        (_draw_bars if bars else _draw_plane)(axes, chart)
        axes.set_title(chart.title, fontsize=11, loc="left")
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
        if caption:
            figure.supxlabel(caption, fontsize=8, color="#666666")
        path = folder / f"{chart.key}.png"
        figure.savefig(path)
        paths.append(path)
    return paths


def _draw_plane(axes: Any, chart: Chart) -> None:
    from matplotlib.ticker import PercentFormatter

    if chart.kind == "area":
        axes.stackplot(chart.series[0].x, *[series.y for series in chart.series],
                       labels=[s.label for s in chart.series],
                       colors=[COLOURS[s.colour][0] for s in chart.series], linewidth=0)
    else:
        for series in chart.series:
            axes.plot(series.x, series.y, label=series.label, color=COLOURS[series.colour][0], linewidth=1.8,
                      marker="o" if chart.kind == "lines" else None, markersize=4)
    if chart.log_x:
        axes.set_xscale("log")
    else:
        axes.set_xlim(left=0)
    axes.set_ylim(0, chart.y_max)
    for value, label in chart.guides:
        if chart.y_max is None or value < chart.y_max:
            axes.axhline(value, color="#888888", linewidth=0.8, linestyle="--")
            axes.annotate(label, (1, value), xycoords=("axes fraction", "data"), ha="right", va="bottom", fontsize=8)
    if chart.percent:
        axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    axes.set_xlabel(chart.x_label)
    axes.set_ylabel(chart.y_label)
    axes.grid(axis="y", color="#e4e4e4", linewidth=0.7)
    axes.set_axisbelow(True)
    axes.legend(fontsize=8, frameon=False, loc="upper left", bbox_to_anchor=(1.0, 1.0))


def _draw_bars(axes: Any, chart: Chart) -> None:
    from matplotlib.ticker import PercentFormatter

    names = list(chart.categories)
    base = [0.0] * len(names)
    for series in chart.series:
        axes.barh(names, series.y, left=base, color=COLOURS[series.colour][0], label=series.label, height=0.65)
        base = [low + value for low, value in zip(base, series.y, strict=True)]
    axes.invert_yaxis()
    axes.set_xlabel(chart.x_label)
    if chart.percent:
        axes.set_xlim(0, chart.y_max)
        axes.xaxis.set_major_formatter(PercentFormatter(1.0))
        axes.legend(fontsize=8, frameon=False, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    else:
        for i, total in enumerate(base):
            axes.annotate(f" {total:.3g}", (total, i), va="center", fontsize=9)
        axes.margins(x=0.12)
