"""A results folder for people: report.md, PNG plots and one HTML page that opens anywhere, offline."""

from __future__ import annotations

import math
from collections.abc import Mapping
from datetime import UTC, datetime
from importlib.resources import files
from pathlib import Path
from typing import Any

from pagedcli.bench import plots
from pagedcli.bench.figures import COLOURS, Chart, all_charts, focus_rate, rate_text
from pagedcli.bench.storage import Results, RunData, write_results
from pagedcli.bench.tables import COLUMNS, ratios, run_rows, significant

PAGE, TEXT = "report.html", "report.md"
PAGE_LIMIT = 1_000_000
"""Bytes that the page stays under."""
_SHOWN = 10


def write_report(results: Results, folder: Path, with_plots: bool = True) -> tuple[list[Path], list[str]]:
    """Write tables, summary, Markdown, plots and page into `folder`. Returns the paths and remarks for the user."""
    paths, remarks = write_results(results, folder), []
    charts = all_charts(results)
    if not with_plots:
        pass
    elif plots.available():
        paths += plots.write_plots(charts, folder, ", ".join(badges(results)))
    else:
        remarks.append(plots.MISSING)
    for name, text in ((TEXT, markdown(results, charts)), (PAGE, html(results, charts))):
        (folder / name).write_text(text, encoding="utf-8")
        paths.append(folder / name)
    return paths, remarks


def badges(results: Results) -> list[str]:
    """What a reader must know before believing a number."""
    found = []
    if any(run.figures.get("simulated") for run in results.runs):
        found.append("simulated time")
    if any(run.figures.get("synthetic") for run in results.runs):
        found.append("synthetic lengths")
    if results.settings.get("load_format") == "dummy":
        found.append("random weights")
    if any(run.figures.get("stopped") for run in results.runs):
        found.append("some runs cut short")
    return found


def markdown(results: Results, charts: list[Chart]) -> str:
    """The report as Markdown; cells and text from traces are escaped."""
    head = ["policy", "rate", *(f"{column.title} ({column.unit})" for column in COLUMNS)]
    lines = [f"# {_md(results.name)}", "", *(f"**{badge}**  " for badge in badges(results)), "",
             *(f"- {_md(ratio.sentence)}" for ratio in ratios(results)), "",
             "| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    lines += ["| " + " | ".join(map(_md, (row.policy, row.rate, *row.cells))) + " |" for row in run_rows(results)]
    lines += [f"\n{_md(text)}" for text in remarks(results)]
    if results.capacity:
        lines += ["", "## Capacity", "", "| policy | limit (s/token) | capacity (req/s) | not held at (req/s) |",
                  "|---|---|---|---|"]
        lines += [f"| {_md(row['policy'])} | {row['limit']:g} | {row['rate']} | {row['above']} |"
                  for row in capacity_rows(results)]
    if plots.available():
        lines += ["", "## Plots", "", *(f"![{_md(chart.title)}]({chart.key}.png)" for chart in charts)]
    lines += ["", "## Signature", "", f"    {results.signature.text}", ""]
    return "\n".join(lines)


def _md(text: str) -> str:
    """Text that Markdown and the HTML it turns into take literally."""
    for sign in "\\`*_[]|":
        text = text.replace(sign, "\\" + sign)
    return text.replace("<", "&lt;").replace(">", "&gt;").replace("\n", " ")


def remarks(results: Results) -> list[str]:
    """Notes of the workload and of runs, each once."""
    notes = list(results.settings.get("notes", []))
    for run in results.runs:
        if run.figures.get("stopped"):
            notes.append(f"{run.policy} at {rate_text(run.rate)} was cut short: {run.figures['stopped']}. Its "
                         "latencies are of the requests that were done, so they are too low to compare")
        notes += run.figures.get("notes", [])
    return list(dict.fromkeys(notes))


TOO_FEW = "unknown: too few requests"


def capacity_rows(results: Results) -> list[dict[str, Any]]:
    """Capacity as texts."""
    return [{"policy": str(item["policy"]), "limit": float(item["limit"]),
             "rate": TOO_FEW if item.get("too_few_requests") else significant(item["rate"]),
             "above": significant(item["above"]) if item.get("above") is not None else "none tried"}
            for item in results.capacity]


def html(results: Results, charts: list[Chart]) -> str:
    """The page. Everything that is text goes through the template's escaping.

    Raises ValueError should it ever reach PAGE_LIMIT bytes.
    """
    from jinja2 import Environment, StrictUndefined

    from pagedcli.bench.charts import svg

    template = (files("pagedcli.bench") / "report_page.html").read_text(encoding="utf-8")
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    page = environment.from_string(template).render(
        name=results.name, badges=badges(results), ratios=ratios(results), focus=focus_rate(results),
        columns=COLUMNS, rows=run_rows(results),
        charts=[(chart, svg(chart)) for chart in charts], colours=COLOURS, capacity=capacity_rows(results),
        remarks=remarks(results), arrivals=_arrivals(results), failures=_failures(results), slowest=_slowest(results),
        settings=results.signature.settings, machine=results.signature.machine, signature=results.signature.text,
        bench=_settings(results.settings), made=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"))
    size = len(page.encode())
    if size >= PAGE_LIMIT:
        raise ValueError(f"the page has {size} bytes, above {PAGE_LIMIT}: fewer rates or policies fit in one report")
    return page


def _settings(settings: Mapping[str, Any]) -> dict[str, str]:
    return {key.replace("_", " "): str(value) for key, value in settings.items()
            if key != "notes" and value not in (None, "", [])}


def _arrivals(results: Results) -> list[dict[str, str]]:
    """Asked and achieved rates, and how late requests were handed over."""
    return [{"policy": run.policy, "asked": rate_text(run.rate),
             "drawn": significant(run.figures.get("request_rate_drawn"), digits=4),
             "achieved": significant(run.figures.get("request_rate_achieved"), digits=4),
             "lag": significant(run.figures.get("p99_dispatch_lag_ms")),
             "duration": significant(run.figures.get("duration")), "steps": f"{run.figures.get('steps', 0):,}",
             "cached": f"{run.figures.get('cached_tokens', 0):,}"} for run in results.runs]


def _rows(run: RunData) -> list[dict[str, Any]]:
    names = ("key", "ok", "e2el", "normalized_latency", "prompt_tokens", "output_tokens", "error", "error_message")
    columns = [run.requests[name] for name in names]
    return [dict(zip(names, values, strict=True)) for values in zip(*columns, strict=True)]


def _failures(results: Results) -> list[dict[str, str]]:
    """The first failed requests of each run (requests that a cut-off run never served are told in its remark)."""
    found = []
    for run in results.runs:
        bad = [row for row in _rows(run) if not row["ok"] and row["error"] != "stopped"]
        found += [{"policy": run.policy, "rate": rate_text(run.rate), "key": str(row["key"]),
                   "error": str(row["error"]), "message": str(row["error_message"])} for row in bad[:_SHOWN]]
    return found[: 4 * _SHOWN]


def _slowest(results: Results) -> list[dict[str, str]]:
    """The requests with the longest end-to-end latency of all."""
    rows = [(run, row) for run in results.runs for row in _rows(run) if row["ok"] and not math.isnan(row["e2el"])]
    rows.sort(key=lambda item: -item[1]["e2el"])
    return [{"policy": run.policy, "rate": rate_text(run.rate), "key": str(row["key"]),
             "e2el": significant(row["e2el"]), "normalized": significant(row["normalized_latency"]),
             "prompt": str(row["prompt_tokens"]), "output": str(row["output_tokens"])} for run, row in rows[:_SHOWN]]
