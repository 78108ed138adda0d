"""Charts of a report, as Vega-Lite specifications that altair creates: one specification per kind of chart.

In the browser, page.js adds the data sets ``curve`` and ``reached`` of the selected runs, and colours by
``series.looks``. An interpreter (``ast``) evaluates expressions, as the page's security policy forbids generated code.
"""

from functools import cache
from typing import Any

DASHES = ([1, 0], [6, 3], [2, 2], [8, 3, 2, 3], [1, 4])


@cache
def vega() -> str:
    """Return a script with Vega, Vega-Lite and vega-embed that defines ``vegaEmbed``. The first call takes seconds."""
    import vl_convert

    return vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;")


def specifications() -> dict[str, Any]:
    """Return the Vega-Lite specification of each kind of chart by name; page.js adds the data."""
    sent = ("bytes", "MB exchanged so far, both directions, all clients")
    return {
        "rounds": _curves("round", "round", "accuracy", "test accuracy, %"),
        "bytes": _curves(*sent, "accuracy", "test accuracy, %"),
        "time": _curves("time", "time of the virtual clock", "accuracy", "test accuracy, %"),
        "loss": _curves("round", "round", "loss", "test loss"),
        "target": _reached(),
    }


def _curves(x: str, x_title: str, y: str, y_title: str) -> dict[str, Any]:
    """Return a chart with a curve per configuration and a band from minimum to maximum. x, y: columns of the data."""
    import altair as alt  # altair takes a second to import

    legend = alt.Legend(orient="bottom", columns=2, labelLimit=300, title=None, symbolType="stroke", symbolOpacity=1,
                        symbolStrokeWidth=2, symbolSize=300)  # fmt: skip
    colour = alt.Color("colour:N", sort=None, legend=legend)
    axis = alt.Axis(tickMinStep=1, format="d") if x == "round" else alt.Axis()  # ticks at whole rounds
    across = alt.X(f"{x}:Q", title=x_title, axis=axis).scale(nice=False)
    tips = [
        alt.Tooltip("name:N", title="runs"), alt.Tooltip("round:Q"), alt.Tooltip(f"{y}:Q", format=".4g", title="mean"),
        alt.Tooltip(f"{y}_low:Q", format=".4g", title="minimum"),
        alt.Tooltip(f"{y}_high:Q", format=".4g", title="maximum"),
        alt.Tooltip("bytes:Q", format=".4g", title="MB so far")]  # fmt: skip
    base = alt.Chart(alt.NamedData("curve"))
    band = base.mark_area(opacity=0.15).encode(
        x=across, y=alt.Y(f"{y}_low:Q", title=y_title), y2=f"{y}_high:Q", color=colour, detail="line:N"
    )
    line = base.mark_line(interpolate="linear").encode(
        x=across, y=alt.Y(f"{y}:Q", title=y_title).scale(zero=False), tooltip=tips, color=colour, detail="line:N",
        strokeWidth=alt.StrokeWidth("width:Q", scale=None),
        strokeDash=alt.StrokeDash("dash:N", sort=None, legend=legend).scale(range=list(DASHES)))  # fmt: skip
    return alt.layer(band, line).properties(width="container", height=240).to_dict()


def _reached() -> dict[str, Any]:
    """Return a chart of rounds to the target: a dot per seed (hollow: target missed), and a bar at their mean."""
    import altair as alt

    base = alt.Chart(alt.NamedData("reached"))
    rows = alt.Y("name:N", sort=None, title=None).axis(labelLimit=220)
    colour = alt.Color("colour:N", sort=None, legend=None)
    tips = [alt.Tooltip("name:N", title="runs"), alt.Tooltip("seed:N"), alt.Tooltip("outcome:N", title="target")]
    axis = alt.Axis(tickMinStep=1, format="d")
    across = alt.X("rounds:Q", title="rounds to the target", axis=axis).scale(zero=True)
    dots = base.mark_point(size=50, opacity=0.8).encode(
        x=across, y=rows, color=colour, fill=alt.Fill("colour:N", sort=None, legend=None),
        fillOpacity=alt.condition("datum.missed", alt.value(0), alt.value(0.8)), tooltip=tips)  # fmt: skip
    bars = base.mark_tick(thickness=2, size=16).encode(x=alt.X("mean(rounds):Q"), y=rows, color=colour)
    return alt.layer(dots, bars).properties(width="container", height=100).to_dict()  # page.js sets the height
