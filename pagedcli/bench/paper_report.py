"""What `pagedcli paper` leaves behind: JSON and a PNG per experiment, and one page of Markdown over all of them."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pagedcli.bench.experiments import Cell, Outcome, Panel
from pagedcli.bench.plots import available
from pagedcli.bench.signature import Signature

COLOURS = ("#4477aa", "#ee6677", "#228833", "#ccbb44", "#aa3377", "#66ccee")
"""Paul Tol's bright scheme: told apart by most colour-blind readers."""


def write_outcome(outcome: Outcome, folder: Path, signature: Signature) -> list[Path]:
    """Write `<key>.json`, signed, and, where matplotlib is installed, `<key>.png`."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{outcome.key}.json"
    content = {**outcome.as_dict(), "signature": signature.text}
    path.write_text(json.dumps(content, indent=1, allow_nan=False) + "\n", "utf-8")
    written = [path]
    if outcome.panels and available():
        written.append(_draw(outcome, folder / f"{outcome.key}.png"))
    return written


def write_summary(folder: Path) -> Path:
    """`README.md` over every experiment whose JSON lies in the folder, in the paper's order.

    Files that this version did not write (older, foreign, damaged) are named on the page with the reason and left out.
    """
    stored, left_out = _stored(folder)
    judged = [cell for item in stored for cell in item["cells"] if cell["verdict"] != "shown"]
    lines = ["# The PagedAttention paper, simulated", "",
             "Written by `pagedcli paper`. Real scheduler and memory policies, simulated time. The cost model was "
             "fitted to Figure 12, to one batch of Figure 13 and, in two terms, to Figure 14; Alpaca's lengths "
             "to two batches of Figure 13. Cells marked (fitted), and all of Figure 12, therefore check the fit and "
             "predict nothing. Request lengths are drawn from fitted distributions unless a note says "
             "otherwise. Paper: Kwon et al., SOSP 2023.", "",
             f"{sum(cell['verdict'] == 'holds' for cell in judged)} of {len(judged)} judged cells hold.", "",
             *_origin(stored), *_named(left_out), *_verdicts(stored)]
    for item in stored:
        lines += [f"## {item['title']}", ""]
        if (folder / f"{item['key']}.png").is_file():
            lines += [f"![{item['title']}]({item['key']}.png)", ""]
        lines += ["| cell | ours | paper | rule | verdict |", "|---|---:|---:|---|---|"]
        lines += [f"| {cell['name']} | {number(cell['ours'], cell['unit'])} | {number(cell['paper'], cell['unit'])} | "
                  f"{cell['rule']} | {cell['verdict']} |" for cell in item["cells"]]
        took = f"- took {item['seconds']:g} s, {item['cpu_seconds']:g} s of processors"
        lines += ["", *(f"- {note}" for note in item["notes"]), took, ""]
    path = folder / "README.md"
    path.write_text("\n".join(lines), "utf-8")
    return path


_NUMBER, _MAYBE = (int, float), (int, float, type(None))
_OUTCOME: Mapping[str, type | tuple[type, ...]] = {
    "key": str, "title": str, "cells": list, "notes": list, "seconds": _NUMBER, "cpu_seconds": _NUMBER,
    "signature": str}
_CELL: Mapping[str, type | tuple[type, ...]] = {"name": str, "ours": _MAYBE, "paper": _MAYBE, "rule": str, "unit": str,
                                                "verdict": str}
"""What the page needs of a file and of each of its cells, and of which type."""


def _stored(folder: Path) -> tuple[list[Mapping[str, Any]], dict[str, str]]:
    """Outcomes in the folder in the paper's order, and the name of every other JSON file there with what is wrong."""
    from pagedcli.bench.experiments import registry

    names = list(registry())
    present = {path.stem: path for path in sorted(folder.glob("*.json"))}
    stored, left_out = [], {}
    for name in sorted(present, key=lambda name: names.index(name) if name in names else len(names)):
        content, wrong = _read(present[name], names)
        if wrong:
            left_out[present[name].name] = wrong
        else:
            stored.append(content)
    return stored, left_out


def _read(path: Path, names: Sequence[str]) -> tuple[Mapping[str, Any], str]:
    """One file's outcome, and what keeps it off the page ("": nothing does)."""
    if path.stem not in names:
        return {}, "no experiment has this name"
    try:
        content = json.loads(path.read_text("utf-8"))
    except OSError as error:
        return {}, f"cannot be read: {error.strerror}"
    except (ValueError, RecursionError):  # neither UTF-8 nor JSON
        return {}, "damaged: not JSON"
    lacks = _lacks(content, _OUTCOME)
    if not lacks:
        lacks = sorted({name for cell in content["cells"] for name in _lacks(cell, _CELL)})
    if lacks:
        return {}, f"of another version: without a usable {', '.join(lacks)}"
    if content["key"] != path.stem:
        return {}, f"holds the results of {content['key']}"
    return content, ""


def _lacks(content: object, needed: Mapping[str, type | tuple[type, ...]]) -> list[str]:
    """Fields that are missing or of another type."""
    if not isinstance(content, dict):
        return list(needed)
    return [name for name, kind in needed.items() if name not in content or not isinstance(content[name], kind)]


def _named(left_out: Mapping[str, str]) -> list[str]:
    """Which files are not on the page, why, and how to get them onto it."""
    if not left_out:
        return []
    return ["Left out, as not comparable with the others (`pagedcli paper NAME` writes an experiment's file anew):", "",
            *(f"- `{name}`: {wrong}" for name, wrong in left_out.items()), ""]


def _origin(stored: Sequence[Mapping[str, Any]]) -> list[str]:
    """Which code on which machine the files are from, or that they are mixed."""
    signatures = sorted({item["signature"] for item in stored})
    if not signatures:
        return []
    if len(signatures) == 1:
        return [f"All from one state of the code: `{signatures[0]}`", ""]
    return ["Files of several states of the code or settings, which the count above adds up:", "", *(
        f"- {', '.join(item['key'] for item in stored if item['signature'] == text)}: `{text}`" for text in signatures),
        ""]


def _verdicts(stored: Sequence[Mapping[str, Any]]) -> list[str]:
    """Cells that hold and cells judged, by experiment, and the names of those that miss."""
    lines = ["| experiment | cells that hold | misses |", "|---|---:|---|"]
    for item in stored:
        judged = [cell for cell in item["cells"] if cell["verdict"] != "shown"]
        missed = [cell["name"] for cell in judged if cell["verdict"] == "misses"]
        held = f"{len(judged) - len(missed)} of {len(judged)}" if judged else "none judged"
        lines.append(f"| {item['key']} | {held} | {'; '.join(missed)} |")
    return [*lines, ""]


def number(value: float | None, unit: str = "") -> str:
    """A figure in four significant digits with its unit; a dash for none."""
    if value is None or not math.isfinite(value):
        return "-"
    text = f"{value:,.0f}" if abs(value) >= 1e4 else f"{value:.4g}"
    return f"{text} {unit}".strip() if unit != "x" else f"{text}x"


def rows(cells: Sequence[Cell]) -> list[tuple[str, str, str, str, str]]:
    """Cells as text: name, ours, paper, rule, verdict."""
    return [(cell.name, number(cell.ours, cell.unit), number(cell.paper, cell.unit), cell.rule, cell.verdict)
            for cell in cells]


def _draw(outcome: Outcome, path: Path) -> Path:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    count = len(outcome.panels)
    across = min(count, 3)
    down = -(-count // across)
    figure = Figure(figsize=(4.6 * across + 0.6, 3.4 * down + 0.3), layout="constrained", dpi=90)
    FigureCanvasAgg(figure)
    for place, panel in enumerate(outcome.panels):
        axes = figure.add_subplot(down, across, place + 1)
        (_bars if panel.kind == "bars" else _lines)(axes, panel)
        axes.set_title(panel.title, fontsize=9, loc="left")
        axes.set_xlabel(panel.x, fontsize=8)
        axes.set_ylabel(panel.y, fontsize=8)
        axes.tick_params(labelsize=7)
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
        axes.legend(fontsize=6, frameon=False)
    figure.supxlabel("simulated; filled: pagedcli, hollow: the paper", fontsize=7, color="#666666")
    figure.savefig(path)
    return path


def _lines(axes: Any, panel: Panel) -> None:
    for place, curve in enumerate(panel.curves):
        colour = COLOURS[place % len(COLOURS)]
        axes.plot(*_columns(curve.ours), color=colour, marker="o", markersize=3, linewidth=1.4, label=curve.label)
        if curve.paper:
            axes.plot(*_columns(curve.paper), color=colour, marker="s", markersize=4, linewidth=0.8, linestyle=":",
                      markerfacecolor="none")
    width, height = panel.limits
    axes.set_xlim(0, width)
    axes.set_ylim(0, height)


def _bars(axes: Any, panel: Panel) -> None:
    many = len(panel.curves)
    wide = 0.8 / many
    for place, curve in enumerate(panel.curves):
        colour = COLOURS[place % len(COLOURS)]
        shift = (place - (many - 1) / 2) * wide
        xs, ys = _columns(curve.ours)
        axes.bar([x + shift for x in xs], ys, wide * 0.92, color=colour, label=curve.label)
        if curve.paper:
            xs, ys = _columns(curve.paper)
            axes.plot([x + shift for x in xs], ys, linestyle="none", marker="s", markersize=5, markerfacecolor="none",
                      color="black")
    if panel.ticks:
        axes.set_xticks(range(len(panel.ticks)), panel.ticks)
    if panel.limits[1] is not None:
        axes.set_ylim(0, panel.limits[1])


def _columns(points: Sequence[tuple[float, float]]) -> tuple[list[float], list[float]]:
    kept = [(x, y) for x, y in points if y is not None and math.isfinite(y)]
    return [x for x, _ in kept], [y for _, y in kept]
