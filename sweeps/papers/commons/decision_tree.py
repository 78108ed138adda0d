"""Picture of the decision trees: questions and leaves below each other, indented, readable on a narrow screen."""

from collections.abc import Mapping
from pathlib import Path
from textwrap import wrap

from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch

from fedcommons.reports import plots
from papers.commons.decide import RULE, Leaf, Question, named, walk

WIDTH, EDGE, INDENT, GAP = 5.0, 0.08, 0.24, 0.09
"""Width of the picture, its edge, the indent of each answer, and the gap between boxes, in inches."""

SIZE, LINE, LETTER = 8.5, 0.155, 0.064
"""Size of the letters in points; height of a line and width of a letter in inches."""

COLOURS = {"question": "#f0f0f0", "way": "#cfe8f7", "base": "white"}


def draw(trees: Mapping[float, Question | Leaf], path: Path, title: str, smoke: bool) -> None:
    """Draw the tree of each alpha into one PNG file, below each other."""
    blocks = [(0.0, None, wrap(title, _fits(0)), "bold")]
    for alpha, node in trees.items():
        blocks.append((0.0, None, [f"alpha = {alpha:g}"], "bold"))
        blocks += [(INDENT * depth, now, _lines(now, answer, depth), "normal") for depth, answer, now in walk(node)]
    blocks.append((0.0, None, wrap(RULE, _fits(0)), "normal"))
    height = sum(LINE * len(lines) + 2 * GAP for _, _, lines, _ in blocks)
    figure = Figure(figsize=(WIDTH, height))
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, WIDTH), ylim=(height, 0))
    axes.set_axis_off()
    y, middles = 0.0, dict[float, float]()  # of the last box at each indent
    for indent, now, lines, weight in blocks:
        tall = LINE * len(lines) + GAP
        x, middle = EDGE + indent, y + GAP / 2 + tall / 2
        if now is not None:
            kind = "question" if isinstance(now, Question) else "base" if now.is_base else "way"
            if indent:
                elbow = x - 0.6 * INDENT
                axes.plot([elbow, elbow, x], [middles[round(indent - INDENT, 3)], middle, middle], color="0.5",
                          linewidth=1, zorder=0)  # fmt: skip
            middles[round(indent, 3)] = y + GAP / 2 + tall
            box = FancyBboxPatch((x, y + GAP / 2), WIDTH - EDGE - x, tall, boxstyle="round,pad=0,rounding_size=0.05",
                                 facecolor=COLOURS[kind], edgecolor="0.5", linewidth=0.8)  # fmt: skip
            axes.add_patch(box)
        for i, text in enumerate(lines):
            is_bold = weight == "bold" or (i == 0 and now is not None)
            axes.text(x + 0.06, y + GAP + LINE * (i + 0.5), text, fontsize=SIZE, va="center",
                      weight="bold" if is_bold else "normal")  # fmt: skip
        y += tall + GAP
    plots.save(figure, path, 200, smoke)


def _fits(depth: int) -> int:
    """Return how many letters fit into a line at this depth."""
    return int((WIDTH - 2 * EDGE - INDENT * depth - 0.12) / LETTER)


def _lines(node: Question | Leaf, answer: str, depth: int) -> list[str]:
    first = f"{answer}: " * bool(answer) + (node.text if isinstance(node, Question) else named(node.way))
    more = [] if isinstance(node, Question) else wrap(node.numbers, _fits(depth))
    return [*wrap(first, int(0.88 * _fits(depth))), *more]
