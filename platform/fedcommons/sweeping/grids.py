"""What the sweeps over a grid (table1, figure3) have in common: options, base experiment, dry run, last words."""

import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jsonargparse import ArgumentParser, Namespace

from fedcommons.artifacts import Store
from fedcommons.config import cli, presets
from fedcommons.config.experiment import Experiment, get, override, same_results
from fedcommons.runs.build import prepare
from fedcommons.sharing.synthetic_pool import missing
from fedcommons.sweeping import sweep as tuning
from fedcommons.sweeping.display import Display

GRID = {  # option: the field it varies
    "seeds": "seed", "algorithms": "algorithm", "alphas": "partition.alpha", "settings": "sharing.setting",
}  # fmt: skip
VARIED = {
    "partition.alpha": "alpha", "partition.n_clients": "N", "federation.participation": "C", "client.lr": "lr",
    "seed": "seed",
}  # fmt: skip
"""Fields in the names of run folders, and what they are called there."""

OWN = {"data.name": "dataset", "data.dir": "data-dir", "data.download": "download", "tracking.wandb": "wandb"}
"""Fields that have an option of their own outside the grid."""


def preset_and_dataset(argv: Sequence[str]) -> tuple[str, str]:
    """What decides the defaults of the other options."""
    preset = cli.early(argv, "preset", "small")
    return preset, cli.early(argv, "dataset", "digits" if preset in ("smoke", "small") else "cifar10")


def parser(
    title: str, preset: str, dataset: str, settings: str, more: Iterable[tuple[str, Any, Any, str]], out: str
) -> ArgumentParser:
    """The options of a grid on top of every field; ``more``: (name, type, default, help) of those of one sweep."""
    result = cli.parser(title, presets.preset(preset, dataset))
    for name, kind, default, text in (
        ("preset", str, "small", f"{', '.join(presets.PRESETS)}: sets the defaults of all fields"),
        ("dataset", str, dataset, "digits, mnist, fmnist, cifar10 or cifar100"),
        ("data-dir", str | None, None, "folder with the data sets; default: FEDCOMMONS_DATA, else ./data"),
        ("seeds", str, "0", "seeds, separated by commas"),
        ("algorithms", str, "fedavg", "algorithms, separated by commas"),
        ("alphas", str, "0.01,0.1", "Dirichlet concentrations, separated by commas"),
        ("settings", str, settings, "data settings, separated by commas"),
        *more,
        ("out", str, out, "folder of the sweep"),
        ("wandb", str, "offline", "online (needs a login), offline or off"),
    ):
        result.add_argument(f"--{name}", type=kind, default=default, help=text)
    result.add_argument("--download", action="store_true", help="fetch the data set if it is not in the folder")
    result.add_argument("--resume", action="store_true", help="continue the sweep in that folder")
    result.add_argument("--dry-run", action="store_true", help="print the cells and which artifacts exist, and stop")
    cli.hide(result, {*GRID.values(), *OWN})
    return result


def refuse_fields(options: Namespace, more: Mapping[str, str]) -> None:
    """Refuse fields that were given though an option of the sweep sets them; ``more``: field to option, as in OWN."""
    cli.refuse_fields(options, {field: option for option, field in GRID.items()} | OWN | dict(more))


def base(options: Namespace) -> Experiment:
    """The experiment that every cell is a variation of."""
    own = {name: options[option.replace("-", "_")] for name, option in OWN.items()}
    return tuning.tracked(override(cli.experiment(options), own), Path(options.out))


def cell(options: Namespace, experiment: Experiment, owned: Collection[str] = ()) -> tuning.Cell:
    """The cell; ``owned``: fields that an option of the sweep sets, which preset authors leaves alone."""
    return tuning.cell(presets.settled(options.preset, experiment, {*options.asked, *owned}), VARIED)


def method_note(cells: Sequence[Experiment]) -> str:
    """The methods' constants, and how clients weigh."""
    fields = {
        "fedprox": (("mu", "fedprox.mu"),),
        "scaffold": (("option", "scaffold.option"),),
        "feddyn": (("alpha", "feddyn.alpha"), ("gradients clipped at", "feddyn.clip")),
        "moon": (("mu", "moon.mu"), ("temperature", "moon.temperature")),
        "fedmix": (("mix", "fedmix.mix"), ("images in a mean", "fedmix.mean_size")),
    }
    parts = [
        f"Clients weigh {'alike' if cells[0].federation.weighting == 'uniform' else 'by their numbers of examples'}"
    ]
    for algorithm in dict.fromkeys(c.algorithm for c in cells):
        those = [c for c in cells if c.algorithm == algorithm]
        constants = [f"{label} {several(those, field)}" for label, field in fields.get(algorithm, ())]
        if algorithm == "fedpvr":
            patterns = those[0].fedpvr.layers
            constants = [f"{'all linear layers' if patterns is None else patterns or 'no layer'} corrected"]
        if algorithm == "feddyn":
            constants.append("corrected model evaluated")
        if constants:
            parts.append(f"{algorithm}: {', '.join(constants)}")
    return "; ".join(parts) + "."


def departures(cells: Sequence[Experiment], varied: Iterable[str]) -> str:
    """Every field that decides results and is not as in preset paper, those in ``varied`` left out; empty for none."""
    paper = presets.experiment("paper", cells[0].data.name)
    hidden = {*varied, "measure.every", "measure.samples", "measure.smoothness"}  # measuring decides nothing
    names = {name: None for c in cells for name in same_results(paper, c) if name not in hidden}
    return "; ".join(f"{name} {several(cells, name)} (paper: {several([paper], name)})" for name in names)


def several(cells: Sequence[Experiment], field: str) -> str:
    """The value of a field, or its values where cells differ."""
    return ", ".join(dict.fromkeys(_plain(get(c, field)) for c in cells))


def _plain(value: object) -> str:
    if isinstance(value, tuple):
        return "-".join(map(str, value))
    return "none" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)


def work_note(cells: Sequence[Experiment]) -> str:
    """How much the clients compute: the footnote under every table."""
    epochs, batch, model = (several(cells, name) for name in ("client.epochs", "client.batch_size", "model.name"))
    work = "E' = floor(n_i E/(n_i + n~)) local epochs with synthetic data, so that steps stay equal"
    return (
        f"{work if cells[0].client.equal_work else f'E = {epochs} local epochs in every setting'}; "
        f"E = {epochs}, B = {batch}, {model}."
    )


def dry_run(cells: Sequence[tuning.Cell], out: Path, display: Display) -> None:
    """Print what would run."""
    for c in cells:
        ready = prepare(c.config)
        store = Store(Path(c.config.artifacts), display.say)
        lacking = sum(len(job.needs) for job in missing(store, ready.needs))
        has = (
            f", {len(ready.needs) - lacking} of {len(ready.needs)} clients' synthetic images exist"
            if ready.needs
            else ""
        )
        display.say(f"{c.name}: {'done' if tuning.is_done(c, out) else 'to run'}{has}")
    display.say(f"{len(cells)} cells.")


def conclude(outcome: tuning.Outcome, started: float, out: Path, stem: str, display: Display) -> int:
    """Say what failed, how long it took and where it all is; the exit code."""
    for name, message in outcome.failures.items():
        display.say(f"failed: {name}: {message}")
    spent = ", ".join(f"{name} {seconds:.0f} s" for name, seconds in outcome.seconds.items())
    display.say(
        f"Time: {time.perf_counter() - started:.0f} s ({spent}; {outcome.generators_trained} generators trained)."
    )
    display.say(f"All in {out}: {stem}.md, {stem}.csv, {stem}.png, summary.json, and a folder for each run.")
    return 1 if outcome.failures else 0
