"""Files of the gradient coding study, written from its curves."""

from collections.abc import Sequence
from pathlib import Path

from fedcommons.cli import parse
from fedcommons.cli.display import Display
from fedcommons.reports import plots, tables
from fedcommons.storage.atomic_files import write_json, write_text
from papers.agc import coding
from papers.agc.curves import Curve
from papers.agc.gradient_coding import Problem
from papers.agc.presets import PER_CLASS, PRESETS


def only(curve: Curve, *quantities: str) -> Curve:
    """Return a copy of the curve with ``quantities`` and their standard errors, but without all other quantities."""
    return {
        n: value for n, value in curve.items() if not isinstance(value, list) or n.removesuffix("_se") in quantities
    }


def report(curves: Sequence[Curve], problem: Problem, options: parse.Options) -> str:
    """Return the table of the curves, with notes, as Markdown."""
    preset = PRESETS[options.preset]
    images = "the first" if preset.first else "random"
    share = f"int(c {PER_CLASS}) of each class" if preset.per_class else f"int(c {len(problem.y)}) of all"
    copied = "to d other clients" if options.sharing == "exact" else "to each other client with probability d/(N-1)"
    notes = f"""
1. {options.dataset}, preset {options.preset}: {images} {PER_CLASS} training images of each class, \
{len(problem.test_y)} test images, pixels in [0, {preset.white:g}]; {problem.n_classes} clients, of which \
Dirichlet(0.1) drops those without images. Initial weights: PyTorch's default, anew in each repetition.
2. {options.repetitions} repetitions, seed {options.seed}; ± is the standard error of their mean. All curves use the \
same random numbers.
3. A client straggles in a round with probability q. Learning rate 0.1, times 0.97 after each round in which a \
client answers; in figure 3 it is 0.01 in all rounds.
4. {share} are not private, chosen at random, and each of these images is copied {copied}.
5. second moment after r rounds: E||g^||^2 of the estimate g^ in the next round, over 15 draws of stragglers; 0 if no \
client answers. g^ estimates the mean gradient; the second moment of the sum is {len(problem.y)}^2 times as large.
6. rounds to {coding.CLOSE:.0%} of iid: rounds until the mean accuracy is this share of the last accuracy of iid \
clients without copies, at the same q. All curves: gradient_coding_table.csv; all rounds: gradient_coding.csv.
"""
    return coding.table(curves) + notes


def write_all(curves: Sequence[Curve], problem: Problem, options: parse.Options, display: Display) -> None:
    """Write summary.json, the tables and the pictures of the curves; the last two curves are those of figure 3."""
    grid = [only(curve, "accuracy", "second_moment") for curve in curves[:-2]]
    figure3 = [only(curve, "same_class", "cross_class", "norm_sq") for curve in curves[-2:]]
    out, smoke = Path(options.out), options.preset == "smoke"
    text = report(grid, problem, options)
    facts = {name: options[name] for name in ("preset", "dataset", "repetitions", "seed", "sharing")}
    write_json(out / "summary.json", {"name": out.name, **facts, "curves": grid, "scalar_products": figure3})
    write_text(out / "gradient_coding.md", text)
    write_text(out / "gradient_coding_table.csv", tables.to_csv(coding.summary(grid)))
    write_text(out / "gradient_coding.csv", tables.to_csv(coding.rows([*grid, *figure3], options.repetitions)))
    many = f"mean over {options.repetitions} repetitions, band: ± standard error"
    for file, partition in (("figure1", "dirichlet_plain"), ("figure2", "single_class"), ("iid", "iid")):
        title = f"{options.dataset} (preset {options.preset}), {coding.NAMES[partition]} clients: {many}"
        plots.save(coding.picture(grid, partition, title), out / f"{file}.png", 110, smoke)
    title = f"{options.dataset} (preset {options.preset}), single class, learning rate 0.01: {many}"
    plots.save(coding.products_picture(figure3, title), out / "figure3.png", 110, smoke)
    display.say(f"\n{text}\nAll in {out}: gradient_coding.md, two .csv, figure1, 2, 3 and iid.png, summary.json.")
