"""Charts of a report, as Vega-Lite specifications by altair: one per kind, filled in the browser group by group.

In the browser, page.js creates the chart data (the rows ``curve`` and ``reached``) from the selected runs. So the page
stores all data only once, and Vega's scripts only once. Vega's own interpreter evaluates its expressions (``ast``),
because the page's security policy forbids all scripts that the page was not written with.
"""

from functools import cache
from typing import TYPE_CHECKING, Any

from fedcommons.reports.series import COLOURS

if TYPE_CHECKING:  # altair takes a second to import
    import altair as alt

LOOKS = [*COLOURS[:6], "#888888"]
"""Colours of Okabe and Ito, with grey instead of black, because pages may have a dark background."""

DASHES = ([1, 0], [6, 3], [2, 2], [8, 3, 2, 3], [1, 4])


@cache
def vega() -> str:
    """Return Vega, Vega-Lite and vega-embed as one script that defines ``vegaEmbed``. The first call takes seconds."""
    import vl_convert

    return vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;")


def specifications() -> dict[str, Any]:
    """Return the Vega-Lite specification of each kind of chart, without data."""
    rounds = ("round:Q", "round")
    sent = ("bytes:Q", "MB exchanged until then, both ways, all clients")
    accuracy, loss = ("accuracy", "test accuracy, %"), ("loss", "test loss")
    return {
        "rounds": _course(*rounds, *accuracy).to_dict(),
        "bytes": _course(*sent, *accuracy).to_dict(),
        "loss": _course(*rounds, *loss).to_dict(),
        "target": _reached().to_dict(),
    }


def _looks() -> "dict[str, Any]":
    """Return the encodings of colour and dash; page.js fills the columns ``colour`` and ``dash``."""
    import altair as alt

    legend = alt.Legend(
        orient="bottom", columns=2, labelLimit=300, title=None, symbolType="stroke", symbolOpacity=1,
        symbolStrokeWidth=2, symbolSize=300,
    )  # fmt: skip
    return {
        "color": alt.Color("colour:N", sort=None, legend=legend).scale(range=LOOKS),
        "strokeDash": alt.StrokeDash("dash:N", sort=None, legend=legend).scale(range=list(DASHES)),
        "detail": "line:N",
    }


def _course(x: str, x_title: str, y: str, y_title: str) -> "alt.LayerChart | alt.FacetChart":
    """Return a chart with one line per cell: mean of finished runs, band from minimum to maximum; thin: unfinished."""
    import altair as alt

    base = alt.Chart(alt.NamedData("curve"))
    across = alt.X(x, title=x_title, axis=_whole() if x.startswith("round") else alt.Axis()).scale(nice=False)
    up = alt.Y(f"{y}:Q", title=y_title).scale(zero=False)
    tips = [
        alt.Tooltip("name:N", title="runs"), alt.Tooltip("round:Q"), alt.Tooltip(f"{y}:Q", format=".4g", title="mean"),
        alt.Tooltip(f"{y}_low:Q", format=".4g", title="least"), alt.Tooltip(f"{y}_high:Q", format=".4g", title="most"),
        alt.Tooltip("bytes:Q", format=".4g", title="MB until then"),
    ]  # fmt: skip
    looks = _looks()
    band = base.mark_area(opacity=0.15).encode(
        x=across, y=alt.Y(f"{y}_low:Q", title=y_title), y2=f"{y}_high:Q", color=looks["color"], detail="line:N"
    )
    line = base.mark_line(interpolate="linear").encode(
        x=across, y=up, tooltip=tips, strokeWidth=alt.StrokeWidth("width:Q", scale=None), **looks
    )
    return alt.layer(band, line).properties(width="container", height=240)


def _whole() -> "alt.Axis":
    """Return an axis for rounds, with ticks at whole numbers."""
    import altair as alt

    return alt.Axis(tickMinStep=1, format="d")


def _reached() -> "alt.LayerChart | alt.FacetChart":
    """Return a chart with one dot per seed (hollow at the last round: target missed) and a bar at the mean."""
    import altair as alt

    base = alt.Chart(alt.NamedData("reached"))
    rows = alt.Y("name:N", sort=None, title=None).axis(labelLimit=220)
    colour = alt.Color("colour:N", sort=None, legend=None).scale(range=LOOKS)
    tips = [alt.Tooltip("name:N", title="runs"), alt.Tooltip("seed:N"), alt.Tooltip("said:N", title="target")]
    across = alt.X("rounds:Q", title="rounds to the target", axis=_whole()).scale(zero=True)
    dots = base.mark_point(size=50, opacity=0.8).encode(
        x=across, y=rows, color=colour, fill=alt.Fill("colour:N", sort=None, legend=None).scale(range=LOOKS),
        fillOpacity=alt.condition("datum.missed", alt.value(0), alt.value(0.8)), tooltip=tips,
    )  # fmt: skip
    bars = base.mark_tick(thickness=2, size=16).encode(x=alt.X("mean(rounds):Q"), y=rows, color=colour)
    return alt.layer(dots, bars).properties(
        width="container", height=100
    )  # page.js sets the height from the number of rows
