"""Charts of a report, as Vega-Lite specifications that altair creates: one specification per kind of chart.

In the browser, page.js fills a specification with the data of the selected runs (the data sets ``curve`` and
``reached``). So the page stores the data of each run once, and Vega's scripts once. Vega evaluates its expressions with
an interpreter (``ast``), because the page's security policy forbids code that is created in the browser.
"""

from functools import cache
from typing import TYPE_CHECKING, Any

from fedcommons.reports.series import COLOURS

if TYPE_CHECKING:  # altair takes a second to import, so functions import it
    import altair as alt

LOOKS = [*COLOURS[:6], "#888888"]
"""Colours of Okabe and Ito, with grey instead of black, because the page can have a dark background."""

DASHES = ([1, 0], [6, 3], [2, 2], [8, 3, 2, 3], [1, 4])


@cache
def vega() -> str:
    """Return a script with Vega, Vega-Lite and vega-embed that defines ``vegaEmbed``. The first call takes seconds."""
    import vl_convert

    return vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;")


def specifications() -> dict[str, Any]:
    """Return the Vega-Lite specification of each kind of chart by name; page.js adds the data."""
    rounds = ("round:Q", "round")
    sent = ("bytes:Q", "MB exchanged so far, both directions, all clients")
    accuracy, loss = ("accuracy", "test accuracy, %"), ("loss", "test loss")
    return {
        "rounds": _course(*rounds, *accuracy).to_dict(),
        "bytes": _course(*sent, *accuracy).to_dict(),
        "loss": _course(*rounds, *loss).to_dict(),
        "target": _reached().to_dict(),
    }


def _looks() -> "dict[str, Any]":
    """Return the encodings of colour and line dashes, for the columns ``colour`` and ``dash`` of page.js's data."""
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
    """Return a chart of curves. x, y: columns of the data; x_title, y_title: titles of the axes.

    A thick line is the mean of a configuration's finished runs, with a band from minimum to maximum. A thin line is an
    unfinished run.
    """
    import altair as alt

    base = alt.Chart(alt.NamedData("curve"))
    across = alt.X(x, title=x_title, axis=_whole() if x.startswith("round") else alt.Axis()).scale(nice=False)
    up = alt.Y(f"{y}:Q", title=y_title).scale(zero=False)
    tips = [
        alt.Tooltip("name:N", title="runs"), alt.Tooltip("round:Q"), alt.Tooltip(f"{y}:Q", format=".4g", title="mean"),
        alt.Tooltip(f"{y}_low:Q", format=".4g", title="minimum"),
        alt.Tooltip(f"{y}_high:Q", format=".4g", title="maximum"),
        alt.Tooltip("bytes:Q", format=".4g", title="MB so far"),
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
    """Return a chart of rounds to the target: a dot per seed (hollow: target missed), and a bar at their mean."""
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
    )  # page.js replaces the height by one that fits the number of rows
