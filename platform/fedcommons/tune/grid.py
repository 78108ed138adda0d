"""What the sweeps have in common besides their main: options, cells, and what stands under their tables."""

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

GRID = {  # option: the field it varies
    "seeds": "seed", "algorithms": "algorithm", "alphas": "partition.alpha", "settings": "sharing.setting",
}  # fmt: skip
VARIED = {
    "partition.alpha": "alpha", "partition.n_clients": "N", "federation.participation": "C", "client.lr": "lr",
    "seed": "seed",
}  # fmt: skip
"""Fields in the names of run folders, and what they are called there."""


def preset_and_dataset(argv: Sequence[str]) -> tuple[str, str]:
    """What decides the defaults of the other options."""
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
    """The options of a grid on top of every field of its parts.

    defaults: of ``algorithms`` and ``settings``; more: (name, type, default, help) of options of one sweep; stem: how
    its default folder begins; fields: what the sweep's presets set, where they are not those of ``presets``.
    """
    preset, dataset = preset_and_dataset(argv)
    lists = {"algorithms": "fedavg", **defaults}
    made_by = parse.early(argv, "generator.name", "ddpm")
    result = parse.parser(title, argv, fields or presets.preset(preset, dataset, made_by), lists)
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
    """Refuse fields that were given though an option of the sweep sets them; ``more``: field to option."""
    parse.refuse_fields(options, {field: option for option, field in GRID.items()} | dict(more))


def base(options: parse.Options) -> dict[str, Any]:
    """The fields of every cell, those of parts that only some cells have included; see ``cell``."""
    return sweep.tracked(parse.flat(options), Path(options.out))


def cell(options: parse.Options, fields: Mapping[str, Any]) -> sweep.Trial:
    """The cell of these fields."""
    return sweep.cell(choose(fields, options.fields), VARIED)


def combined(options: parse.Options, *lists: Sequence[Any]) -> list[tuple[Any, ...]]:
    """The combinations of these lists; with ``--dry-run``, of more than ``sweep.TOLD`` a few, which stand for all.

    Raises:
        UserError: there are more than a sweep may have.
    """
    if counted(options, n := prod(map(len, lists))):
        return search_space.some(lists, sweep.FEW)
    sweep.require_few(n)
    return list(product(*lists))


def counted(options: parse.Options, n: int) -> bool:
    """Whether n cells are only counted, in a dry run, which is told their number as ``options.total``."""
    options.total = n if options.dry_run and n > sweep.TOLD else None
    return options.total is not None


def once(cells: Iterable[sweep.Trial]) -> list[sweep.Trial]:
    """Each cell once: where a partition knows no alpha, those of all alphas are one."""
    return list({cell.name: cell for cell in cells}.values())


def finished(cells: Iterable[sweep.Trial], out: Path, say: Callable[[str], None] = print) -> "pd.DataFrame":
    """The finished runs of these cells, in their order; ``say`` is told which cannot be read. See ``load_runs``."""
    import pandas as pd

    folders = [out / c.name for c in cells if is_run(out / c.name) and (out / c.name / "summary.json").exists()]
    runs = load_runs(*folders, say=say) if folders else pd.DataFrame()
    return runs if runs.empty else runs.loc[runs["status"] == "finished", :]


def method_note(cells: Sequence[Experiment]) -> str:
    """The methods' constants, but for those that are null, and how clients weigh."""
    said = [
        f"Clients weigh {'alike' if cells[0].federation.weighting == 'uniform' else 'by their numbers of examples'}"
    ]
    for algorithm in dict.fromkeys(c.algorithm for c in cells):
        those, section = [c for c in cells if c.algorithm == algorithm], registry.section("algorithm", algorithm)
        given = [name for name in those[0].constants if any(c.constants[name] is not None for c in those)]
        constants = [f"{name.replace('_', ' ')} {several(those, f'{section}.{name}')}" for name in given]
        if constants:
            called = KINDS["algorithm"].known.get(algorithm, algorithm).rpartition(":")[2]
            said.append(f"{called}'s {', '.join(constants)}")
    return "; ".join(said) + "."


def departures(cells: Sequence[Experiment], varied: Iterable[str]) -> str:
    """Every field that decides results and is not as in preset paper, those in ``varied`` left out; empty for none."""
    hidden = {
        *varied,
        "measure.every",
        "measure.samples",
        "measure.smoothness",
        "client.onednn",
    }  # no more than rounding
    found: dict[str, str] = {}
    for c in cells:
        names = {KINDS[kind].field: name for kind, name in c.chosen.items() if kind in ("algorithm", "sharing")}
        paper = choose({**presets.preset("paper", cells[0].data.name), **names})
        has, wanted = c.flat, paper.flat
        for name in same_results(paper, c):
            if name not in hidden and name in has and name in wanted:
                found[name] = _plain(wanted[name])
    return "; ".join(f"{name} {several(cells, name)} (paper: {paper})" for name, paper in found.items())


def several(cells: Sequence[Experiment], field: str) -> str:
    """The value of a field, or its values where cells differ."""
    found = [c.flat for c in cells]
    return ", ".join(dict.fromkeys(_plain(flat[field]) for flat in found if field in flat))


def _plain(value: object) -> str:
    if isinstance(value, tuple):
        return "-".join(map(str, value))
    if value is None or isinstance(value, bool):
        return {None: "none", True: "on", False: "off"}[value]
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def work_note(cells: Sequence[Experiment]) -> str:
    """How much the clients compute: the footnote under every table."""
    epochs, batch, model = (several(cells, name) for name in ("client.epochs", "client.batch_size", "model.name"))
    work = "E' = floor(n_i E/(n_i + n~)) local epochs with synthetic data, so that steps stay equal"
    return (
        f"{work if cells[0].client.equal_work else f'E = {epochs} local epochs in every setting'}; "
        f"E = {epochs}, B = {batch}, {model}."
    )


def title(cells: Sequence[Experiment]) -> str:
    """What stands over a picture: data set, target, number of seeds."""
    datasets = ", ".join(dict.fromkeys(registry.label(c.data.name) for c in cells))
    seeds = len({c.seed for c in cells})
    targets = {c.target for c in cells}
    reach = several(cells, "target") if len(targets) > 1 else target.in_words(cells[0].target)
    of = "" if any(isinstance(one, str) for one in targets) else " test accuracy"
    return f"{datasets}, target {reach}{of}, {seeds} seed{'s' * (seeds > 1)}"


def is_smoke(options: parse.Options) -> bool:
    """Whether the runs are too small to say anything: their tables and pictures are stamped."""
    return options.preset == "smoke"


def stamped(text: str, options: parse.Options) -> str:
    """A table, with the stamp above it if its runs are too small to say anything."""
    return f"**{presets.SMOKE}**\n\n{text}" if is_smoke(options) else text
