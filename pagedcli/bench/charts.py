"""Charts as SVG that lives inside the page: colours are CSS classes, so they follow the light or dark scheme."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from markupsafe import Markup

from pagedcli.bench.figures import Chart, Series

WIDTH, HEIGHT = 640.0, 340.0
_LEFT, _RIGHT, _TOP, _BOTTOM = 66.0, 16.0, 14.0, 50.0
_BAR, _GAP = 26.0, 14.0

Scale = Callable[[float], float]


def nice_ticks(low: float, high: float, count: int = 5) -> list[float]:
    """About `count` round numbers that lie in [low, high]."""
    if not high > low:
        return [low]
    rough = (high - low) / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 2.5, 5, 10) if power * factor >= rough * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [round(k * step, 12) for k in range(first, math.floor(high / step + 1e-9) + 1)]


def log_ticks(low: float, high: float) -> list[float]:
    """1, 2 and 5 times powers of ten in [low, high]; powers alone when there are many."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    factors = (1, 2, 5) if len(powers) <= 3 else (1, 3) if len(powers) <= 5 else (1,)
    return [f * 10.0**p for p in powers for f in factors if low * 0.999 <= f * 10.0**p <= high * 1.001]


def number(value: float, percent: bool = False) -> str:
    """A tick label."""
    if percent:
        return f"{value * 100:g} %"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:g}"


def svg(chart: Chart) -> Markup:
    """The chart as one `<svg>` element, labels escaped, with a title for screen readers."""
    body, height = _bars(chart) if chart.kind == "bars" else (_plane(chart), HEIGHT)
    return Markup('<svg viewBox="0 0 {} {}" role="img" aria-label="{}"><title>{}</title>{}</svg>').format(
        f"{WIDTH:g}", f"{height:g}", chart.title, chart.title, Markup("").join(body))


def _text(x: float, y: float, text: str, anchor: str = "middle", kind: str = "tick", turn: bool = False) -> Markup:
    spin = Markup(' transform="rotate(-90 {} {})"').format(f"{x:.1f}", f"{y:.1f}") if turn else ""
    return Markup('<text x="{}" y="{}" text-anchor="{}" class="{}"{}>{}</text>').format(
        f"{x:.1f}", f"{y:.1f}", anchor, kind, spin, text)


def _line(x1: float, y1: float, x2: float, y2: float, kind: str) -> Markup:
    return Markup('<line x1="{}" y1="{}" x2="{}" y2="{}" class="{}"/>').format(
        f"{x1:.1f}", f"{y1:.1f}", f"{x2:.1f}", f"{y2:.1f}", kind)


def _plane(chart: Chart) -> list[Markup]:
    """Axes, grid and series of every kind but bars."""
    xs = [value for series in chart.series for value in series.x]
    low, high = _x_range(chart, xs)
    stacked = chart.kind == "area"
    top = chart.y_max or max((value for series in chart.series for value in series.y), default=1.0) * 1.08 or 1.0
    right, bottom = WIDTH - _RIGHT, HEIGHT - _BOTTOM

    def at_x(value: float) -> float:
        share = (math.log(value / low) / math.log(high / low)) if chart.log_x else (value - low) / (high - low)
        return _LEFT + share * (right - _LEFT)

    def at_y(value: float) -> float:
        return bottom - value / top * (bottom - _TOP)

    parts = []
    for tick in nice_ticks(0.0, top):
        parts += [_line(_LEFT, at_y(tick), right, at_y(tick), "grid"),
                  _text(_LEFT - 8, at_y(tick) + 4, number(tick, chart.percent), "end")]
    for tick in log_ticks(low, high) if chart.log_x else nice_ticks(low, high, 6):
        parts += [_line(at_x(tick), bottom, at_x(tick), bottom + 5, "axis"),
                  _text(at_x(tick), bottom + 20, number(tick))]
    drawn = _areas(chart.series, at_x, at_y) if stacked else _curves(chart, at_x, at_y, top)
    parts.append(_clipped(drawn, _LEFT - 5, _TOP, right + 5, bottom + 5))
    x_label = chart.x_label + (", log scale" if chart.log_x else "")
    parts += [_line(_LEFT, bottom, right, bottom, "axis"),
              _text((_LEFT + right) / 2, HEIGHT - 8, x_label, kind="label"),
              _text(16, (_TOP + bottom) / 2, chart.y_label, kind="label", turn=True)]
    for value, label in chart.guides:
        if value < top:
            parts += [_line(_LEFT, at_y(value), right, at_y(value), "guide"),
                      _text(right - 4, at_y(value) - 5, label, "end", "guide-text")]
    return parts


def _x_range(chart: Chart, xs: Sequence[float]) -> tuple[float, float]:
    low, high = min(xs, default=0.0), max(xs, default=1.0)
    if chart.log_x:
        return low * 0.9, high * 1.1
    if chart.kind != "lines":
        return 0.0, high * 1.01 or 1.0
    return 0.0, high * 1.04 or 1.0


def _clipped(parts: Sequence[Markup], left: float, top: float, right: float, bottom: float) -> Markup:
    """Drawings cut at the plot's edge: an inner `<svg>` hides what leaves it, so no values are bent to fit."""
    box = f"{left:g} {top:g} {right - left:g} {bottom - top:g}".split()
    return Markup('<svg x="{}" y="{}" width="{}" height="{}" viewBox="{}">{}</svg>').format(
        *box, " ".join(box), Markup("").join(parts))


def _curves(chart: Chart, at_x: Scale, at_y: Scale, top: float) -> list[Markup]:
    parts = []
    for series in chart.series:
        points = Markup(" ").join(f"{at_x(x):.1f},{at_y(y):.1f}" for x, y in zip(series.x, series.y, strict=True))
        parts.append(Markup('<polyline points="{}" class="curve s-{}"/>').format(points, series.colour))
        if chart.kind == "lines":
            parts += [Markup('<circle cx="{}" cy="{}" r="4" class="dot f-{}"><title>{}</title></circle>').format(
                f"{at_x(x):.1f}", f"{at_y(y):.1f}", series.colour, f"{series.label}: {number(x)} -> {y:.4g}")
                for x, y in zip(series.x, series.y, strict=True) if y <= top]
    return parts


def _areas(series: Sequence[Series], at_x: Scale, at_y: Scale) -> list[Markup]:
    """Bands from the bottom up; each polygon goes along its upper edge and back along its lower one."""
    parts = []
    base = [0.0] * len(series[0].x)
    for item in series:
        upper = [low + value for low, value in zip(base, item.y, strict=True)]
        there = [f"{at_x(x):.1f},{at_y(y):.1f}" for x, y in zip(item.x, upper, strict=True)]
        back = [f"{at_x(x):.1f},{at_y(y):.1f}" for x, y in zip(item.x, base, strict=True)][::-1]
        parts.append(Markup('<polygon points="{}" class="band f-{}"><title>{}</title></polygon>').format(
            " ".join(there + back), item.colour, item.label))
        base = upper
    return parts


def _bars(chart: Chart) -> tuple[list[Markup], float]:
    """Horizontal bars, one a category, stacked over the series. Single-valued bars carry their number."""
    left = 20.0 + 7.6 * max(map(len, chart.categories), default=0)
    totals = [sum(series.y[i] for series in chart.series) for i in range(len(chart.categories))]
    stacked = any(sum(series.y[i] > 0 for series in chart.series) > 1 for i in range(len(chart.categories)))
    right = WIDTH - (24.0 if stacked else 78.0)
    top = chart.y_max or max(totals, default=1.0) or 1.0
    bottom = _TOP + len(chart.categories) * (_BAR + _GAP)

    def at_x(value: float) -> float:
        return left + value / top * (right - left)

    parts = []
    for tick in nice_ticks(0.0, top, 5):
        parts += [_line(at_x(tick), _TOP - 4, at_x(tick), bottom, "grid"),
                  _text(at_x(tick), bottom + 18, number(tick, chart.percent))]
    for i, category in enumerate(chart.categories):
        y, at = _TOP + i * (_BAR + _GAP), 0.0
        parts.append(_text(left - 8, y + _BAR / 2 + 4, category, "end", "name"))
        for series in chart.series:
            value = series.y[i]
            if value <= 0:
                continue
            width = at_x(at + value) - at_x(at)
            shown = f"{value * 100:.1f} %" if chart.percent else f"{value:.4g}"
            parts.append(Markup(
                '<rect x="{}" y="{}" width="{}" height="{}" class="band f-{}"><title>{}: {}</title></rect>').format(
                f"{at_x(at):.1f}", f"{y:.1f}", f"{width:.1f}", f"{_BAR:g}", series.colour, series.label, shown))
            if stacked and width > 46:
                parts.append(_text(at_x(at) + width / 2, y + _BAR / 2 + 4, shown, kind=f"in-bar on-{series.colour}"))
            at += value
        if not stacked:
            parts.append(_text(at_x(at) + 6, y + _BAR / 2 + 4, f"{totals[i]:.3g}", "start", "value"))
    parts += [_line(left, _TOP - 4, left, bottom, "axis"),
              _text((left + right) / 2, bottom + 40, chart.x_label, kind="label")]
    return parts, bottom + 50
