"""Tables 1, 5 and 6 of FedDPMS: what images decoded from other clients' noisy codes bring, and what they cost.

python sweeps/feddpms.py                     # digits, some minutes on a laptop
python sweeps/feddpms.py --preset smoke      # the same code with smaller numbers, under a minute
python sweeps/feddpms.py --dataset fmnist --data-dir DIR      # a part of Fashion-MNIST
python sweeps/feddpms.py --preset paper --dataset fmnist --data-dir DIR      # the paper's numbers, for GPUs
"""

import time
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

from jsonargparse import Namespace

from fedcommons.config import cli
from fedcommons.config.experiment import Experiment
from fedcommons.config.flat import flat_dict
from fedcommons.errors import UserError
from fedcommons.files import write_json, write_text
from fedcommons.reports import tables
from fedcommons.sweeping import grids, sweep
from fedcommons.sweeping.display import Display
from fedcommons.tracking.run_folder import read_summary

ALGORITHMS = "feddpms,fedvae,fedavg,fedprox,moon,fedmix"
AUTOENCODERS = ("feddpms", "fedvae")

ALL: dict[str, Any] = {
    "partition.name": "dirichlet_niid", "federation.weighting": "samples", "client.optimizer": "adam",
    "model.name": "vae", "fedprox.mu": 0.001, "measure.every": 0,
}  # fmt: skip
DIGITS: dict[str, Any] = {  # chosen on seeds 100 and 101
    "client.lr": 5e-3, "client.batch_size": 16, "client.epochs": 3, "federation.rounds": 16,
    "model.latent": 16, "model.channels": (8, 16), "feddpms.quota": 5, "feddpms.sigma": 1.0,
}  # fmt: skip
FMNIST: dict[str, Any] = {"model.latent": 32, "model.channels": (16, 32), "feddpms.quota": 50, "feddpms.sigma": 3.0}
CIFAR: dict[str, Any] = {"model.latent": 128, "model.channels": (32, 64), "model.depth": 2, "feddpms.sigma": 4.0}
PAPERS: Mapping[str, dict[str, Any]] = {
    "fmnist": FMNIST, "mnist": FMNIST, "cifar10": {**CIFAR, "feddpms.quota": 200},
    "cifar100": {**CIFAR, "feddpms.quota": 50, "feddpms.classes": 10},
}  # fmt: skip
LAPTOP = {  # chosen on seed 100 of Fashion-MNIST, where the decoded images can be recognised
    "data.limit": 1000, "data.validation": 0.0, "client.lr": 3e-3, "client.batch_size": 32, "client.epochs": 5,
    "federation.rounds": 20, "feddpms.quota": 10, "feddpms.sigma": 1.0,
}  # fmt: skip


def fields(preset: str, dataset: str) -> dict[str, Any]:
    """What this sweep sets on top of a preset; the paper's rate, batches, epochs and rounds in preset paper."""
    large = PAPERS.get(dataset)
    if preset == "paper":
        rest = {"client.lr": 1e-3, "client.batch_size": 64, "client.epochs": 5, "federation.rounds": 50}
        return {**ALL, **rest, **(large or {})}
    if preset == "smoke" or large is None:
        return {**ALL, **DIGITS, **({"federation.rounds": 4, "client.epochs": 1} if preset == "smoke" else {})}
    return {**ALL, **large, **LAPTOP}


def arguments(argv: Sequence[str]) -> Namespace:
    """Options of the tables on top of every field of the experiment."""
    preset, dataset = grids.preset_and_dataset(argv)
    if preset == "authors":
        raise UserError("--preset authors is of Fedssyn: use paper, small or smoke.")
    few = preset == "smoke"
    more = (
        ("sigmas", str, "1" if few else "0.5,1,2,4", "table 5: noise, with the default quota; empty for none"),
        ("quotas", str, "2" if few else "2,5,10,20", "table 5: codes of a class, with the default noise; or empty"),
    )
    title, defaults = (__doc__ or "").partition("\n")[0], {"algorithms": ALGORITHMS, "settings": "real"}
    parser = grids.parser(title, argv, defaults, more, "feddpms", fields(preset, dataset))
    parser.set_defaults(alphas="0.5")
    options = cli.parse(parser, argv)
    grids.refuse_fields(options, {})
    return options


def grid(options: Namespace) -> list[sweep.Cell]:
    """The cells of table 1, then those that only table 5 has."""
    algorithms = cli.split("--algorithms", options.algorithms)
    cells = [
        _cell(options, algorithm, alpha, seed, {})
        for alpha, algorithm, seed in product(_alphas(options), algorithms, cli.split("--seeds", options.seeds, int))
    ]
    return grids.once([*cells, *(cell for _, _, line in table5(options) for cell in line)])


def table5(options: Namespace) -> list[tuple[str, float, list[sweep.Cell]]]:
    """The lines of table 5: the field that is varied, its value, and a cell for each seed."""
    lines = []
    for field, text, kind in (("sigma", options.sigmas, float), ("quota", options.quotas, int)):
        for value in cli.split(f"--{field}s", text, kind) if text else ():
            seeds = cli.split("--seeds", options.seeds, int)
            values = {f"feddpms.{field}": value}
            lines.append((field, value, [_cell(options, "feddpms", _alphas(options)[0], s, values) for s in seeds]))
    return lines


def _alphas(options: Namespace) -> tuple[float, ...]:
    return cli.split("--alphas", options.alphas, float)


def _cell(options: Namespace, algorithm: str, alpha: float, seed: int, values: Mapping[str, Any]) -> sweep.Cell:
    """All train the same encoder and classifier; those of autoencoders have a decoder beside it."""
    model = "vae" if algorithm in AUTOENCODERS else "encoder"
    given = {} if "model.name" in options.asked else {"model.name": model}
    varied = {"seed": seed, "algorithm": algorithm, "partition.alpha": alpha, "sharing.setting": "real"}
    return grids.cell(options, {**grids.base(options), **varied, **given, **values})


def report(cells: Sequence[sweep.Cell], out: Path, options: Namespace) -> str:
    """Write the tables, the pictures and the summary from the run folders that are done; the tables, if any is."""
    from fedcommons.reports import exchange

    found = {cell.name: s for cell in cells if (s := read_summary(out / cell.name))}
    if not found:
        return ""
    write_json(out / "summary.json", {"name": out.name, "preset": options.preset, "cells": list(found.values())})
    given = {name: e for name in found if (e := exchange.read(out / name))}
    text = [_table1(cells, found, options), _table5(found, given, options), _table6(cells, found, given)]
    markdown = grids.stamped("\n\n".join(filter(None, text)) + "\n", options)
    write_text(out / "feddpms.md", markdown)
    rows = [
        {"run_dir": n, **{k: v for k, v in s.items() if isinstance(v, int | float | str)}} for n, s in found.items()
    ]
    write_text(out / "feddpms.csv", tables.to_csv([{k: r.get(k) for k in rows[0]} for r in rows]))
    if first := next((name for name in found if name in given), None):
        exchange.picture(out / "feddpms.png", given[first], grids.is_smoke(options))
    return markdown


def _percent(found: Mapping[str, Any], cells: Sequence[sweep.Cell], name: str) -> list[float]:
    return [100 * found[c.name][name] for c in cells if c.name in found]


def _table1(cells: Sequence[sweep.Cell], found: Mapping[str, Any], options: Namespace) -> str:
    head = ["alpha", "algorithm", "last acc.", "best acc.", "last - FedAvg's", "MB", "seeds"]
    lines, defaults = [], {c.name: c for c in cells if not _only_table5(c, options)}
    for alpha, algorithm in product(_alphas(options), cli.split("--algorithms", options.algorithms)):

        def of(name: str, alpha: float = alpha) -> dict[int, sweep.Cell]:
            fit = [c for c in defaults.values() if c.config.algorithm == name and c.name in found]
            return {c.config.seed: c for c in fit if flat_dict(c.config).get("partition.alpha") == alpha}

        mine, plain = of(algorithm), of("fedavg")
        if not mine:
            continue
        both = [s for s in mine if s in plain]
        gaps = [_percent(found, [mine[s]], "last_accuracy")[0] - _percent(found, [plain[s]], "last_accuracy")[0]
                for s in both]  # fmt: skip
        accuracies = (tables.mean_std(_percent(found, [*mine.values()], f"{k}_accuracy"), 1) for k in ("last", "best"))
        sent = [(found[c.name]["bytes_down"] + found[c.name]["bytes_up"] + found[c.name]["bytes_once"]) / 1e6
                for c in mine.values()]  # fmt: skip
        gap = tables.mean_std(gaps, 1) if gaps and algorithm != "fedavg" else ""
        lines.append([f"{alpha:g}", algorithm, *accuracies, gap, tables.mean_std(sent, 2), str(len(mine))])
    configs = [c.config for c in defaults.values()]
    notes = (
        "Accuracy in %: top-1 of the server model on the whole test set; last: after the last round, best: of all. "
        "± is the sample standard deviation over seeds; the gap to FedAvg is taken seed by seed.",
        "FedDPMS and FedVAE train the autoencoder on pixels in [0, 1]; the others its encoder and classifier alone, "
        "without a log-variance, on normalised pixels.",
        grids.work_note(configs), grids.method_note(configs),
    )  # fmt: skip
    return "Table 1\n\n" + tables.markdown(head, lines) + "".join(f"\n{i}. {n}" for i, n in enumerate(notes, 1))


def _only_table5(cell: sweep.Cell, options: Namespace) -> bool:
    """Whether the cell has other noise or another quota than table 1's."""
    constants = cell.config.constants
    return cell.config.algorithm == "feddpms" and any(constants[n] != options.feddpms[n] for n in ("sigma", "quota"))


def _table5(found: Mapping[str, Any], given: Mapping[str, Any], options: Namespace) -> str:
    head = ["", "value", "last acc.", "best acc.", "codes kept, % of the quota", "seeds"]
    lines = []
    for field, value, cells in table5(options):
        there = [c for c in cells if c.name in found]
        if there:
            kept = [100 * given[c.name].kept / _most(c.config) for c in there if c.name in given]
            accuracies = (tables.mean_std(_percent(found, there, f"{k}_accuracy"), 1) for k in ("last", "best"))
            lines.append([field, f"{value:g}", *accuracies, tables.mean_std(kept, 0), str(len(there))])
    return "Table 5\n\n" + tables.markdown(head, lines) if lines else ""


def _most(config: Experiment) -> int:
    """How many codes all clients give at most."""
    return config.partition.n_clients * config.constants["quota"] * config.constants["classes"]


def _table6(cells: Sequence[sweep.Cell], found: Mapping[str, Any], given: Mapping[str, Any]) -> str:
    """Bytes beyond the model's, counted against the closed forms of appendix A.9, for the first FedDPMS run."""
    from fedcommons.studies import feddpms_costs as costs

    first = next((c for c in cells if c.name in found and c.name in given), None)
    if first is None:
        return ""
    c, e, s = first.config, given[first.name], found[first.name]
    k = round(c.federation.participation * c.partition.n_clients)
    model = 2 * k * c.federation.rounds * 4 * e.model
    # a decoder goes up in the last round of stage I, and down at each client's first selection in stage II
    downloads = costs.expected_downloads(c.federation.rounds, e.preliminary, c.partition.n_clients, k)
    quota, classes = c.constants["quota"], c.constants["classes"]
    codes = 2 * k * 4 * e.model * costs.of_codes(quota, classes, e.latent, e.model)
    closed = {"model": model, "decoders": 4 * (k + downloads) * e.decoder, "codes, at most": codes}
    counted = s["bytes_down"] + s["bytes_up"]
    lines = [[name, f"{value:.0f}", f"{100 * value / model:.2f}"] for name, value in closed.items()]
    lines.append(["sum", f"{sum(closed.values()):.0f}", f"{100 * sum(closed.values()) / model:.2f}"])
    lines.append(["counted", str(counted), f"{100 * counted / model:.2f}"])
    ratio = 100 * costs.of_decoder(c.federation.rounds, e.preliminary, c.partition.n_clients, k)
    note = (
        f"{first.name}; labels (8 bytes a code) and flags are counted besides. The paper's r_2, for a decoder as large "
        f"as the model: {ratio:.2f} %. T_p / T = {e.preliminary} / {c.federation.rounds} more computation."
    )
    return "Table 6\n\n" + tables.markdown(["closed form", "bytes", "% of the model's"], lines) + f"\n{note}"


def feddpms(argv: Sequence[str]) -> int:
    started = time.perf_counter()
    options = arguments(argv)
    out, cells = Path(options.out), grid(options)
    with Display() as display:
        if options.dry_run:
            grids.dry_run(cells, out, display, options.on_cores)
            return 0
        left = sweep.todo(cells, out, display)
        with sweep.open_sweep(out, options.resume):
            outcome = sweep.run_cells(left, out, display)
            display.say("\n" + report(cells, out, options))
            return grids.conclude(outcome, started, out, "feddpms", display)


if __name__ == "__main__":
    cli.main(feddpms)
