"""Grid sweeps: the command-line options that all sweeps share, their trials, and the notes under their tables."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import product
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedcommons.cli import parse, search_space
from fedcommons.cli.parser import NewOption
from fedcommons.cli.values import number, split
from fedcommons.config import presets, registry, target
from fedcommons.config.dotted import SHORT_NAMES, choose, same_results
from fedcommons.config.experiment import Experiment
from fedcommons.config.registry import KINDS
from fedcommons.errors import UserError, quote, unknown
from fedcommons.reports.frames import load_runs
from fedcommons.tracking.run_folder import is_run
from fedcommons.tune import sweep

if TYPE_CHECKING:  # pandas takes a second to import, and --help needs none
    import pandas as pd

GRID = {  # option: the field that the option varies
    "seeds": "seed", "algorithms": "algorithm", "alphas": "partition.alpha", "settings": "sharing.setting",
}  # fmt: skip
PRESETS = ("smoke", "small", "paper")  # without "authors", which has values for one paper's table only
VARIED = {
    "partition.alpha": "alpha", "partition.n_clients": "N", "federation.participation": "C", "client.lr": "lr",
    "seed": "seed",
}  # fmt: skip
"""Fields that appear in the names of run folders, and their short names there."""


def preset_and_dataset(
    argv: Sequence[str], names: Collection[str] = presets.PRESETS, small: str = "digits", large: str = "cifar10"
) -> tuple[str, str]:
    """Return the names of preset and data set in the command line; both decide the defaults of all other options.

    names: the sweep's presets. small, large: default data sets, ``small`` with the presets smoke and small.
    """
    preset = preset_of(argv, names)
    return preset, parse.early(argv, "data.name", small if preset in ("smoke", "small") else large)


def preset_of(argv: Sequence[str], names: Collection[str], default: str = "small") -> str:
    """Return the name of the preset in the command line, one of the sweep's ``names``."""
    preset = parse.early(argv, "preset", default)
    if preset not in names:
        raise unknown("preset", preset, names)
    return preset


def study_parser(
    doc: str | None,
    argv: Sequence[str],
    stem: str,
    names: Collection[str],
    fields: Mapping[str, Any],
    options: Iterable[NewOption],
    *,
    lists: Mapping[str, str] | None = None,
    short: Mapping[str, str] | None = None,
) -> parse.Parser:
    """Return the parser of a study: the chosen components' fields, the study's options and the options of all sweeps.

    doc: text whose first line is the title of ``--help``. stem: the beginning of the default folder's name. names: the
    study's presets. fields: values of the fields in the chosen preset. options: options of the study, see
    ``Parser.add_options``. lists: see ``parse.parser``. short: short names of options in addition to those of fields.
    """
    result = parse.parser(doc, argv, fields, lists)
    folder = f"runs/{stem}-{parse.early(argv, 'preset', 'small')}-{registry.label(fields['data.name'])}"
    result.add_options((
        ("preset", str, "small", f"{', '.join(names)}: sets the defaults of all fields"),
        ("seeds", str, "0", "seeds, separated by commas"),
        *options,
        ("out", str, folder, "folder of the sweep"),
        ("resume", bool, False, "continue the sweep in that folder"),
    ))  # fmt: skip
    parse.add_shared(result)
    result.short = {**SHORT_NAMES, **(short or {})}
    return result


def parser(
    doc: str | None,
    argv: Sequence[str],
    defaults: Mapping[str, str],
    more: Iterable[NewOption],
    stem: str,
    fields: Mapping[str, Any] | None = None,
) -> parse.Parser:
    """Return the parser of a grid sweep: algorithms, alphas, sharing strategies, seeds, and ``more`` options.

    defaults: defaults of ``algorithms``, ``settings`` and ``alphas``. stem: the beginning of the default folder's name.
    fields: values of the fields in the sweep's preset; None: the values of ``presets``. See ``study_parser``.
    """
    preset, dataset = preset_and_dataset(argv)
    lists = {"algorithms": "fedavg", "alphas": "0.01,0.1", **defaults}
    generator = parse.early(argv, "generator.name", "ddpm")
    options = (
        ("algorithms", str, lists["algorithms"], "algorithms, separated by commas"),
        ("alphas", str, lists["alphas"], "Dirichlet concentrations, separated by commas"),
        ("settings", str, lists["settings"], "sharing strategies (settings), separated by commas"),
        *more,
    )
    short = {"alpha": "alphas", "setting": "settings", "sharing": "settings"}
    usual = fields or presets.preset(preset, dataset, generator)
    result = study_parser(doc, argv, stem, presets.PRESETS, usual, options, lists=lists, short=short)
    result.hide(GRID.values())
    return result


def values(options: parse.Options, name: str, kind: Callable[[str], Any] = str, allowed: str = "") -> tuple[Any, ...]:
    """Return the values that the option ``name`` lists, separated by commas; see ``split``."""
    return split(f"--{name}", options[name], kind, allowed)


def listed(options: parse.Options, name: str, kind: Callable[[str], Any] = str, allowed: str = "") -> tuple[Any, ...]:
    """Return the values that the option ``name`` lists; none if the option is empty or None."""
    return values(options, name, kind, allowed) if options[name] else ()


def pairs(options: parse.Options, name: str, kinds: tuple[type, type], form: str) -> list[tuple[Any, ...]]:
    """Return the pairs of numbers that an option lists. kinds: their types. form: such as ``N:C``, with an example."""
    try:
        texts = [text.split(":") for text in values(options, name)]
        return [tuple(number(*each) for each in zip(kinds, text, strict=True)) for text in texts]
    except (ValueError, OverflowError):
        raise UserError(f"--{name} takes pairs {form}, separated by commas, got {quote(options[name])}.") from None


def rate_owners(options: parse.Options, argv: Sequence[str], of_rates: Mapping[str, str]) -> dict[str, str]:
    """Return field -> option for each option that lists learning rates. Several rates require validation data.

    of_rates: option -> field of the learning rate. If the user set the field and not the option, the option becomes
    empty.
    """
    for name, field in of_rates.items():
        if field in options.asked and name.replace("-", "_") not in parse.named(argv):
            options[name] = ""
        require_validation(options, name, several=True)
    return {field: name for name, field in of_rates.items() if options[name]}


def require_validation(options: parse.Options, name: str, *, several: bool = False) -> None:
    """Refuse an option that lists learning rates if there are no validation data to choose by.

    several: refuse the option only if it lists more than one learning rate.
    """
    if options[name] and (not several or "," in options[name]) and options.data.validation == 0:
        raise UserError(f"--{name} chooses by validation accuracy: data.validation must be above 0.")


def refuse_fields(options: parse.Options, more: Mapping[str, str]) -> None:
    """Raise a UserError if the user set a field of ``GRID`` or ``more`` (field -> option) that an option sets."""
    parse.refuse_fields(options, {field: option for option, field in GRID.items()} | dict(more))


def base(options: parse.Options) -> dict[str, Any]:
    """Return the field values from the command line, which all trials share unless the sweep varies the field."""
    return sweep.tracked(parse.flat(options), Path(options.out))


def cell(options: parse.Options, fields: Mapping[str, Any]) -> sweep.Trial:
    """Return the trial (name and experiment) whose fields have the values ``fields``."""
    return sweep.cell(choose(fields, options.fields), VARIED)


def lists(options: parse.Options) -> dict[str, Sequence[Any]]:
    """Return the values that the options of ``GRID`` list, by the field that an option varies; seeds come last."""
    return {
        "partition.alpha": values(options, "alphas", float), "algorithm": values(options, "algorithms"),
        "sharing.setting": values(options, "settings"), "seed": values(options, "seeds", int),
    }  # fmt: skip


def combined(options: parse.Options, lists: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """Return all combinations of the listed values, by field.

    A dry run with more than ``sweep.MAX_LISTED`` combinations returns a random sample of ``sweep.FEW`` combinations.

    Raises:
        UserError: there are more combinations than a sweep may have trials.
    """
    if print_count(options, n := prod(map(len, lists.values()))):
        points = search_space.some([*lists.values()], sweep.FEW)
    else:
        sweep.require_few(n)
        points = product(*lists.values())
    return [dict(zip(lists, point, strict=True)) for point in points]


def print_count(options: parse.Options, n: int) -> bool:
    """Return whether a dry run of n trials measures only a sample of the trials.

    Also set ``options.total``: to n if only a sample is measured, else to None.
    """
    options.total = n if options.dry_run and n > sweep.MAX_LISTED else None
    return options.total is not None


def once(cells: Iterable[sweep.Trial]) -> list[sweep.Trial]:
    """Return each trial once; for example, a partition without alpha gives the same trial for each alpha."""
    return list({cell.name: cell for cell in cells}.values())


def frame(cells: Iterable[sweep.Trial], out: Path, say: Callable[[str], None]) -> "pd.DataFrame":
    """Return a table with one row per trial whose run has finished at least one round."""
    import pandas as pd

    folders = [out / c.name for c in cells if is_run(out / c.name)]
    return load_runs(*folders, say=say) if folders else pd.DataFrame()


def finished(cells: Iterable[sweep.Trial], out: Path, say: Callable[[str], None] = print) -> "pd.DataFrame":
    """Return a table with one row per finished run of the trials, in order; unreadable runs are reported to ``say``."""
    runs = frame((c for c in cells if (out / c.name / "summary.json").exists()), out, say)
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
    # The named fields change results by rounding errors at most.
    hidden = {*varied, "measure.every", "measure.samples", "measure.smoothness", "client.onednn"}
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


def title(cells: Sequence[Experiment], with_target: bool = True) -> str:
    """Return the title of a figure, as text: data set, target, number of seeds."""
    datasets = ", ".join(dict.fromkeys(registry.label(c.data.name) for c in cells))
    seeds = len({c.seed for c in cells})
    targets = {c.target for c in cells}
    reach = several(cells, "target") if len(targets) > 1 else target.in_words(cells[0].target)
    unit = "" if any(isinstance(target_value, str) for target_value in targets) else " test accuracy"
    return f"{datasets}, {f'target {reach}{unit}, ' * with_target}{seeds} seed{'s' * (seeds > 1)}"


def is_smoke(options: parse.Options) -> bool:
    """Check whether the preset is ``smoke``, whose runs are too small for conclusions."""
    return options.get("preset") == "smoke"


def stamped(text: str, options: parse.Options) -> str:
    """Return a table as text, with a warning above it if the preset is ``smoke``."""
    return f"**{presets.SMOKE}**\n\n{text}" if is_smoke(options) else text
