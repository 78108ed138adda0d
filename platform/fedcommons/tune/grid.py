"""Grid sweeps: the options and trials that all sweeps have in common, and the notes under their tables."""

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
    """Return the preset and the data set, which decide the defaults of all other options."""
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
    """Return the parser with the options of a grid and every field of the grid's components.

    defaults: the defaults of ``algorithms`` and ``settings``; more: (name, type, default, help) of options of one
    sweep; stem: the beginning of the default folder's name; fields: the fields that the sweep's presets set, if they
    differ from ``presets``.
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
        ("settings", str, lists["settings"], "data settings, separated by commas"),
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
    """Refuse fields in the user's options that an option of the sweep also sets; ``more``: further field to option."""
    parse.refuse_fields(options, {field: option for option, field in GRID.items()} | dict(more))


def base(options: parse.Options) -> dict[str, Any]:
    """Return the fields of all trials, including the fields of components that only some trials use; see ``cell``."""
    return sweep.tracked(parse.flat(options), Path(options.out))


def cell(options: parse.Options, fields: Mapping[str, Any]) -> sweep.Trial:
    """Return the trial with the values ``fields``."""
    return sweep.cell(choose(fields, options.fields), VARIED)


def combined(options: parse.Options, *lists: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Return all combinations of the lists; in a dry run of more than ``sweep.MAX_LISTED`` trials, only a sample.

    Raises:
        UserError: there are more combinations than a sweep may have trials.
    """
    if print_count(options, n := prod(map(len, lists))):
        return search_space.some(lists, sweep.FEW)
    sweep.require_few(n)
    return list(product(*lists))


def print_count(options: parse.Options, n: int) -> bool:
    """Check whether a dry run only counts n trials (and times a sample); if so, set ``options.total`` to n."""
    options.total = n if options.dry_run and n > sweep.MAX_LISTED else None
    return options.total is not None


def once(cells: Iterable[sweep.Trial]) -> list[sweep.Trial]:
    """Return each trial once: for a partition without alpha, the trials of all alphas are the same."""
    return list({cell.name: cell for cell in cells}.values())


def finished(cells: Iterable[sweep.Trial], out: Path, say: Callable[[str], None] = print) -> "pd.DataFrame":
    """Return the table of the trials' finished runs, in order; unreadable runs are reported, see ``load_runs``."""
    import pandas as pd

    folders = [out / c.name for c in cells if is_run(out / c.name) and (out / c.name / "summary.json").exists()]
    runs = load_runs(*folders, say=say) if folders else pd.DataFrame()
    return runs if runs.empty else runs.loc[runs["status"] == "finished", :]


def method_note(cells: Sequence[Experiment]) -> str:
    """Return the clients' weighting and the methods' constants that are not null, as text under a table."""
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
    """Return the fields, without ``varied``, that decide results and differ from preset ``paper``; "" for none."""
    hidden = {
        *varied,
        "measure.every",
        "measure.samples",
        "measure.smoothness",
        "client.onednn",
    }  # these fields change at most rounding
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
    """Return the value of a field as text, or all its values if the trials differ."""
    flats = [c.flat for c in cells]
    return ", ".join(dict.fromkeys(_plain(flat[field]) for flat in flats if field in flat))


def _plain(value: object) -> str:
    if isinstance(value, tuple):
        return "-".join(map(str, value))
    if value is None or isinstance(value, bool):
        return {None: "none", True: "on", False: "off"}[value]
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def work_note(cells: Sequence[Experiment]) -> str:
    """Return the footnote under every table: the local work of the clients."""
    epochs, batch, model = (several(cells, name) for name in ("client.epochs", "client.batch_size", "model.name"))
    work = "E' = floor(n_i E/(n_i + n~)) local epochs with synthetic data, so that steps stay equal"
    return (
        f"{work if cells[0].client.equal_work else f'E = {epochs} local epochs in every setting'}; "
        f"E = {epochs}, B = {batch}, {model}."
    )


def title(cells: Sequence[Experiment]) -> str:
    """Return the title of a figure: data set, target, number of seeds."""
    datasets = ", ".join(dict.fromkeys(registry.label(c.data.name) for c in cells))
    seeds = len({c.seed for c in cells})
    targets = {c.target for c in cells}
    reach = several(cells, "target") if len(targets) > 1 else target.in_words(cells[0].target)
    unit = "" if any(isinstance(target_value, str) for target_value in targets) else " test accuracy"
    return f"{datasets}, target {reach}{unit}, {seeds} seed{'s' * (seeds > 1)}"


def is_smoke(options: parse.Options) -> bool:
    """Check whether the runs are smoke tests, too small for conclusions, whose tables and figures are stamped."""
    return options.preset == "smoke"


def stamped(text: str, options: parse.Options) -> str:
    """Return a table, with a stamp above it if its runs are smoke tests."""
    return f"**{presets.SMOKE}**\n\n{text}" if is_smoke(options) else text
