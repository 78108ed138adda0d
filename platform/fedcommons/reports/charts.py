"""The charts of a report, as Vega-Lite by altair: one specification a kind, filled in the browser group by group.

Their data are the rows ``curve`` and ``reached`` that page.js makes of the runs that are shown, so that data stand in
the page once, whatever is drawn of them. Vega's scripts stand in it once, too. Vega's own interpreter evaluates its
expressions (``ast``), as the page's policy allows no script but those that it was written with.
"""

from functools import cache
from typing import TYPE_CHECKING, Any

from fedcommons.reports.series import COLOURS

if TYPE_CHECKING:  # it takes a second to import
    import altair as alt

LOOKS = [*COLOURS[:6], "#888888"]
"""Of Okabe and Ito's colours the black one is grey here, as pages may be dark."""

DASHES = ([1, 0], [6, 3], [2, 2], [8, 3, 2, 3], [1, 4])


@cache
def vega() -> str:
    """Vega, Vega-Lite and vega-embed, as one script that leaves ``vegaEmbed`` in the window. Takes seconds, once."""
    import vl_convert

    return vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;")


def specifications() -> dict[str, Any]:
    """By kind of chart what Vega-Lite draws, without data."""
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
    """Colour and dash: page.js says which column each stands for."""
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
    """A line a cell, the mean over its finished runs, in a band from the least to the most; runs under way are thin."""
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
    """An axis of rounds, which are whole."""
    import altair as alt

    return alt.Axis(tickMinStep=1, format="d")


def _reached() -> "alt.LayerChart | alt.FacetChart":
    """A dot a seed; hollow, at the run's last round, where it missed the target; a bar at the mean."""
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
    return alt.layer(dots, bars).properties(width="container", height=100)  # page.js knows how many rows there are
