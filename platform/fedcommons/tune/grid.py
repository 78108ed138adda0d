"""Grid sweeps: the command-line options that all sweeps share, their trials, and the notes under their tables."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import product
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedcommons.cli import parse, search_space
from fedcommons.config import presets, registry, target
from fedcommons.config.dotted import SHORT_NAMES, choose, same_results
from fedcommons.config.experiment import Experiment
from fedcommons.config.registry import KINDS
from fedcommons.reports.frames import load_runs
from fedcommons.tracking.run_folder import is_run
from fedcommons.tune import sweep

if TYPE_CHECKING:  # pandas takes a second to import, and --help needs none
    import pandas as pd

GRID = {  # option: the field that the option varies
    "seeds": "seed", "algorithms": "algorithm", "alphas": "partition.alpha", "settings": "sharing.setting",
}  # fmt: skip
VARIED = {
    "partition.alpha": "alpha", "partition.n_clients": "N", "federation.participation": "C", "client.lr": "lr",
    "seed": "seed",
}  # fmt: skip
"""Fields that appear in the names of run folders, and their short names there."""


def preset_and_dataset(argv: Sequence[str]) -> tuple[str, str]:
    """Return the names of preset and data set in the command line; both decide the defaults of all other options."""
    preset = parse.early(argv, "preset", "small")
    return preset, parse.early(argv, "data.name", "digits" if preset in ("smoke", "small") else "cifar10")


def parser(
    title: str,
    argv: Sequence[str],
    defaults: Mapping[str, str],
    more: Iterable[tuple[str, Any, Any, str]],
    stem: str,
    fields: Mapping[str, Any] | None = None,
) -> parse.Parser:
    """Return the parser with the options of a grid sweep and every field of the chosen components.

    title: the title of ``--help``. defaults: the defaults of the options ``algorithms`` and ``settings``. more: (name,
    type, default, help) of each further option of the sweep. stem: the beginning of the default folder's name.
    fields: values of the fields in the sweep's preset; None: the values of ``presets``.
    """
    preset, dataset = preset_and_dataset(argv)
    lists = {"algorithms": "fedavg", **defaults}
    generator = parse.early(argv, "generator.name", "ddpm")
    result = parse.parser(title, argv, fields or presets.preset(preset, dataset, generator), lists)
    for name, kind, default, text in (
        ("preset", str, "small", f"{', '.join(presets.PRESETS)}: sets the defaults of all fields"),
        ("seeds", str, "0", "seeds, separated by commas"),
        ("algorithms", str, lists["algorithms"], "algorithms, separated by commas"),
        ("alphas", str, "0.01,0.1", "Dirichlet concentrations, separated by commas"),
        ("settings", str, lists["settings"], "sharing strategies (settings), separated by commas"),
        *more,
        ("out", str, f"runs/{stem}-{preset}-{registry.label(dataset)}", "folder of the sweep"),
    ):
        result.add_argument(f"--{name}", type=kind, default=default, help=text)
    result.add_argument("--resume", action="store_true", help="continue the sweep in that folder")
    parse.add_shared(result)
    result.short = {**SHORT_NAMES, "alpha": "alphas", "setting": "settings", "sharing": "settings"}
    result.hide(GRID.values())
    return result


def refuse_fields(options: parse.Options, more: Mapping[str, str]) -> None:
    """Refuse a field that the user set although a sweep's option sets it; ``more``: further fields -> option."""
    parse.refuse_fields(options, {field: option for option, field in GRID.items()} | dict(more))


def base(options: parse.Options) -> dict[str, Any]:
    """Return the values of the fields that all trials have in common, also for components that only some trials use."""
    return sweep.tracked(parse.flat(options), Path(options.out))


def cell(options: parse.Options, fields: Mapping[str, Any]) -> sweep.Trial:
    """Return the trial (name and experiment) whose fields have the values ``fields``."""
    return sweep.cell(choose(fields, options.fields), VARIED)


def combined(options: parse.Options, *lists: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Return all combinations of values, one from each list.

    A dry run with more than ``sweep.MAX_LISTED`` combinations returns a random sample of ``sweep.FEW`` combinations.

    Raises:
        UserError: there are more combinations than a sweep may have trials.
    """
    if print_count(options, n := prod(map(len, lists))):
        return search_space.some(lists, sweep.FEW)
    sweep.require_few(n)
    return list(product(*lists))


def print_count(options: parse.Options, n: int) -> bool:
    """Return whether a dry run of n trials measures only a sample of the trials.

    Also set ``options.total``: to n if only a sample is measured, else to None.
    """
    options.total = n if options.dry_run and n > sweep.MAX_LISTED else None
    return options.total is not None


def once(cells: Iterable[sweep.Trial]) -> list[sweep.Trial]:
    """Return each trial once; for example, a partition without alpha gives the same trial for each alpha."""
    return list({cell.name: cell for cell in cells}.values())


def finished(cells: Iterable[sweep.Trial], out: Path, say: Callable[[str], None] = print) -> "pd.DataFrame":
    """Return a table with one row per finished run of the trials, in order; unreadable runs are reported to ``say``."""
    import pandas as pd

    folders = [out / c.name for c in cells if is_run(out / c.name) and (out / c.name / "summary.json").exists()]
    runs = load_runs(*folders, say=say) if folders else pd.DataFrame()
    return runs if runs.empty else runs.loc[runs["status"] == "finished", :]


def method_note(cells: Sequence[Experiment]) -> str:
    """Return a table's footnote: the clients' weighting, and the methods' constants that are not null."""
    sentences = [
        f"Clients weigh {'alike' if cells[0].federation.weighting == 'uniform' else 'by their numbers of examples'}"
    ]
    for algorithm in dict.fromkeys(c.algorithm for c in cells):
        those, section = [c for c in cells if c.algorithm == algorithm], registry.section("algorithm", algorithm)
        names = [name for name in those[0].constants if any(c.constants[name] is not None for c in those)]
        constants = [f"{name.replace('_', ' ')} {several(those, f'{section}.{name}')}" for name in names]
        if constants:
            label = KINDS["algorithm"].components.get(algorithm, algorithm).rpartition(":")[2]
            sentences.append(f"{label}'s {', '.join(constants)}")
    return "; ".join(sentences) + "."


def departures(cells: Sequence[Experiment], varied: Iterable[str]) -> str:
    """Return, as text, the fields that decide results and differ from preset ``paper``; "" if there are none.

    varied: fields that the sweep varies, which are left out.
    """
    hidden = {
        *varied,
        "measure.every",
        "measure.samples",
        "measure.smoothness",
        "client.onednn",
    }  # left out, as these fields change results by rounding errors at most
    differing: dict[str, str] = {}
    for c in cells:
        names = {KINDS[kind].field: name for kind, name in c.chosen.items() if kind in ("algorithm", "sharing")}
        paper = choose({**presets.preset("paper", cells[0].data.name), **names})
        has, wanted = c.flat, paper.flat
        for name in same_results(paper, c):
            if name not in hidden and name in has and name in wanted:
                differing[name] = _plain(wanted[name])
    return "; ".join(f"{name} {several(cells, name)} (paper: {paper})" for name, paper in differing.items())


def several(cells: Sequence[Experiment], field: str) -> str:
    """Return the value of a field as text, or a list of all values if the experiments differ."""
    flats = [c.flat for c in cells]
    return ", ".join(dict.fromkeys(_plain(flat[field]) for flat in flats if field in flat))


def _plain(value: object) -> str:
    if isinstance(value, tuple):
        return "-".join(map(str, value))
    if value is None or isinstance(value, bool):
        return {None: "none", True: "on", False: "off"}[value]
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def work_note(cells: Sequence[Experiment]) -> str:
    """Return the footnote under every table on local training: epochs E, batch size B and model."""
    epochs, batch, model = (several(cells, name) for name in ("client.epochs", "client.batch_size", "model.name"))
    work = "E' = floor(n_i E/(n_i + n~)) local epochs with synthetic data, so that steps stay equal"
    return (
        f"{work if cells[0].client.equal_work else f'E = {epochs} local epochs in every setting'}; "
        f"E = {epochs}, B = {batch}, {model}."
    )


def title(cells: Sequence[Experiment]) -> str:
    """Return the title of a figure, as text: data set, target, number of seeds."""
    datasets = ", ".join(dict.fromkeys(registry.label(c.data.name) for c in cells))
    seeds = len({c.seed for c in cells})
    targets = {c.target for c in cells}
    reach = several(cells, "target") if len(targets) > 1 else target.in_words(cells[0].target)
    unit = "" if any(isinstance(target_value, str) for target_value in targets) else " test accuracy"
    return f"{datasets}, target {reach}{unit}, {seeds} seed{'s' * (seeds > 1)}"


def is_smoke(options: parse.Options) -> bool:
    """Check whether the preset is ``smoke``, whose runs are too small for conclusions."""
    return options.preset == "smoke"


def stamped(text: str, options: parse.Options) -> str:
    """Return a table as text, with a warning above it if the preset is ``smoke``."""
    return f"**{presets.SMOKE}**\n\n{text}" if is_smoke(options) else text
