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
    """Return the curve with only the lists of these quantities and their standard errors."""
    return {
        n: value for n, value in curve.items() if not isinstance(value, list) or n.removesuffix("_se") in quantities
    }


def report(curves: Sequence[Curve], problem: Problem, options: parse.Options) -> str:
    """Return the table and the notes that explain it."""
    preset = PRESETS[options.preset]
    images = "the first" if preset.first else "random"
    share = f"int(c {PER_CLASS}) of each class" if preset.per_class else f"int(c {len(problem.y)}) of all"
    copied = "to d other clients" if options.sharing == "exact" else "to each other client with probability d/(N-1)"
    notes = f"""
1. {options.dataset}, preset {options.preset}: {images} {PER_CLASS} training images of each class, \
{len(problem.test_y)} test images, pixels in [0, {preset.white:g}]; {problem.n_classes} clients, of which \
Dirichlet(0.1) drops those that get no image. Start: PyTorch's default, anew in each repetition.
2. {options.repetitions} repetitions, seed {options.seed}; ± is the standard error of their mean. All curves use the \
same random numbers.
3. A client straggles in a round with probability q. Learning rate 0.1, times 0.97 after each round that somebody \
answers; in figure 3 it is 0.01 throughout.
4. {share} are not private, drawn at random, and each is copied {copied}.
5. second moment after r rounds: E||g^||^2 of the estimate for the next one, over 15 draws of stragglers; 0 if nobody \
answers. It is of the mean gradient; that of the sum is {len(problem.y)}^2 times as large.
6. rounds to {coding.CLOSE:.0%} of iid: until the mean accuracy is that part of the last one of iid clients that \
share nothing, at the same q. All curves and c: gradient_coding_table.csv; each round of them: gradient_coding.csv.
"""
    return coding.table(curves) + notes


def write_all(curves: Sequence[Curve], problem: Problem, options: parse.Options, display: Display) -> None:
    """Write the summary, the tables and the pictures; the last two curves belong to figure 3."""
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
