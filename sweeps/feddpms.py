"""FedDPMS's tables 1, 2, 5, 6 and figures 2, 3: what images decoded from others' noisy codes bring, and what they cost.

python sweeps/feddpms.py                     # digits, some minutes on a laptop
python sweeps/feddpms.py --preset smoke      # the same code with smaller numbers, under a minute
python sweeps/feddpms.py --alphas 0.1,0.3,0.5 --clients 10:430,20:860,30:1290 --preliminary 0.3,0.4,0.5
python sweeps/feddpms.py --dataset fmnist --data-dir DIR      # a part of Fashion-MNIST
python sweeps/feddpms.py --preset paper --dataset fmnist --data-dir DIR      # the paper's numbers, for GPUs
python sweeps/feddpms.py --preset authors --dataset cifar10 --data-dir DIR   # as the authors' released code runs it
"""

import time
from collections.abc import Callable, Mapping, Sequence
from itertools import chain, product
from pathlib import Path
from typing import Any

from jsonargparse import Namespace

from fedcommons.config import cli
from fedcommons.config.flat import choose
from fedcommons.errors import UserError, shown
from fedcommons.files import write_json, write_text
from fedcommons.reports import columns, tables
from fedcommons.reports.cells import cells
from fedcommons.sweeping import grids, sweep
from fedcommons.sweeping.display import Display
from papers.feddpms import presets

ALGORITHMS = "feddpms,fedvae,fedavg,fedprox,moon,fedmix"
AUTOENCODERS = ("feddpms", "fedvae")
CONSTANTS: Mapping[str, tuple[str, Callable[[str], Any]]] = {
    "sigmas": ("sigma", float), "quotas": ("quota", int), "privacies": ("privacy", str), "helpers": ("helpers", int),
    "preliminary": ("preliminary_rounds", float),
}  # fmt: skip
"""Options that vary a constant of FedDPMS alone, one at a time: table 5 and figure 3."""


def arguments(argv: Sequence[str]) -> Namespace:
    """Options of the tables on top of every field of the experiment."""
    preset, dataset = grids.preset_and_dataset(argv)
    few, hundred = preset == "smoke", preset in ("paper", "authors") and dataset == "cifar100"
    more = (
        ("sigmas", str, "1" if few else "0.5,1,2,4", "table 5: noise; empty for none, like those that follow"),
        ("quotas", str, "2" if few else "2,5,10,20", "table 5: codes of a class"),
        ("preliminary", str, "", "figure 3: shares of the rounds that stage I takes, such as 0.3,0.4,0.5"),
        ("privacies", str, "", "paper, sound, or both"),
        ("helpers", str, "", "numbers of clients whose codes one client gets, at most"),
        ("receives", str, "decoded,real,nothing" if preset == "small" else "",
         "ablations at every alpha, beside FedAvg: decoded, real, nothing; empty for none"),
        ("lrs", str | None, None, "learning rates to choose from by validation accuracy; default: client.lr alone"),
        ("clients", str, ",".join(f"{n}:{500 * n}" for n in range(10, 60, 10)) if hundred else "",
         "table 2: pairs N:images, N clients that share so many, at the first alpha"),
    )  # fmt: skip
    title, defaults = (__doc__ or "").partition("\n")[0], {"algorithms": ALGORITHMS, "settings": "real"}
    parser = grids.parser(title, argv, defaults, more, "feddpms", presets.fields(preset, dataset))
    parser.set_defaults(alphas="0.5")
    options = cli.parse(parser, argv)
    grids.refuse_fields(options, {} if options.lrs is None else {"client.lr": "lrs"})
    if options.lrs is not None and options.data.validation == 0:
        raise UserError("--lrs chooses by validation accuracy: data.validation must be above 0.")
    return options


def grid(options: Namespace) -> dict[str, list[sweep.Cell]]:
    """The cells of each table; a cell may stand in several."""
    algorithms, alphas = cli.split("--algorithms", options.algorithms), cli.split("--alphas", options.alphas, float)
    found = {"Table 1": [c for alpha, a in product(alphas, algorithms) for c in _cells(options, a, alpha)]}
    found["Table 2"] = [
        cell
        for (n, images), a in product(_federations(options.clients), algorithms)
        for cell in _cells(options, a, alphas[0], {"partition.n_clients": n, "data.limit": images})
    ]
    receives = cli.split("--receives", options.receives) if options.receives else []
    ablated = [("fedavg", {}), *(("feddpms", {"feddpms.receive": name}) for name in receives)] if receives else []
    found["Ablations"] = [c for alpha, (a, given) in product(alphas, ablated) for c in _cells(options, a, alpha, given)]
    found |= {"Table 5": [], "Figure 3": []}
    for option, (field, kind) in CONSTANTS.items():
        for value in cli.split(f"--{option}", options[option], kind) if options[option] else ():
            table = "Figure 3" if option == "preliminary" else "Table 5"
            if option == "preliminary":
                value = _preliminary(value, options.federation.rounds)
            found[table] += _cells(options, "feddpms", alphas[0], {f"feddpms.{field}": value})
    return {table: grids.once(of) for table, of in found.items() if of}


def _federations(text: str) -> list[tuple[int, int]]:
    """Pairs N:images.

    Raises:
        UserError: they are none.
    """
    pairs = [one.split(":") for one in cli.split("--clients", text)] if text else []
    if not all(len(pair) == 2 and all(number.isdigit() for number in pair) for pair in pairs):
        raise UserError(f"--clients takes pairs N:images such as 10:430,20:860, got {shown(text)}.")
    return [(int(n), int(images)) for n, images in pairs]


def _preliminary(share: float, rounds: int) -> int | None:
    """T_p; None where it is the default's, so that the run is the same.

    Raises:
        UserError: a share that leaves nothing for stage II.
    """
    if not 0 <= share < 1:
        raise UserError(f"--preliminary takes shares in [0, 1), got {share:g}.")
    last = round(share * rounds)
    return None if last == round(0.4 * rounds) else last


def _cells(
    options: Namespace, algorithm: str, alpha: float, values: Mapping[str, Any] | None = None
) -> list[sweep.Cell]:
    """One for each rate and seed. All train the same encoder and classifier; autoencoders have a decoder beside it."""
    model = "vae" if algorithm in AUTOENCODERS else "encoder"
    given = {} if "model.name" in options.asked else {"model.name": model}
    rates = [options.client.lr] if options.lrs is None else cli.split("--lrs", options.lrs, float)
    fixed = {"algorithm": algorithm, "partition.alpha": alpha, "sharing.setting": "real", **given, **(values or {})}
    seeds = cli.split("--seeds", options.seeds, int)
    return [
        sweep.cell(
            choose({**grids.base(options), **fixed, "client.lr": rate, "seed": seed}, options.fields), grids.VARIED
        )
        for rate, seed in product(rates, seeds)
    ]


def report(of_tables: Mapping[str, Sequence[sweep.Cell]], out: Path, options: Namespace) -> str:
    """Write the tables, the pictures and the summary from the run folders that are done; the tables, if any is."""
    from papers.feddpms import exchange
    from papers.feddpms import tables as feddpms_tables

    every = grids.finished(_once(of_tables), out)
    if every.empty:
        return ""
    records = tables.records(every, [*tables.RUN, *columns.others(cells(every)[0])])
    write_json(out / "summary.json", {"name": out.name, "preset": options.preset, "cells": records})
    write_text(out / "feddpms.csv", tables.to_csv(records))
    exchanges = {run: e for run in every["run"] if (e := exchange.read(Path(run)))}
    compared = {}
    for table, of in of_tables.items():
        runs = grids.finished(of, out)
        compared[table] = [] if runs.empty else tables.compared(feddpms_tables.with_kept(runs, exchanges))
    configs = [cell.config for cell in _once(of_tables)]
    notes = [*feddpms_tables.NOTES, grids.work_note(configs), grids.method_note(configs)]
    text, smoke = [], grids.is_smoke(options)
    for table, of in compared.items():
        if of:
            whole = table in ("Table 1", "Table 2", "Ablations")
            said = feddpms_tables.methods(of, notes) if whole else feddpms_tables.constants(of, options.dp.delta)
            text.append(f"{table}\n\n{said}")
    if first := next((run for run in every.to_dict("records") if run["run"] in exchanges), None):
        text.append(f"Table 6\n\n{feddpms_tables.sent(first, exchanges[first['run']])}")
        exchange.picture(out / "feddpms.png", exchanges[first["run"]], smoke)
    one, two, three = (compared.get(table, []) for table in ("Table 1", "Table 2", "Figure 3"))
    feddpms_tables.over_rounds(out / "feddpms_rounds.png", [*one, *three], smoke)
    feddpms_tables.over_federations(out / "feddpms_federations.png", [*one, *two], smoke)
    markdown = grids.stamped("\n".join(text), options)
    write_text(out / "feddpms.md", markdown)
    return markdown


def _once(of_tables: Mapping[str, Sequence[sweep.Cell]]) -> list[sweep.Cell]:
    return grids.once(chain.from_iterable(of_tables.values()))


def feddpms(argv: Sequence[str]) -> int:
    started = time.perf_counter()
    options = arguments(argv)
    out, of_tables = Path(options.out), grid(options)
    every = _once(of_tables)
    with Display() as display:
        if options.dry_run:
            grids.dry_run(every, out, display, options.on_cores)
            return 0
        left = sweep.todo(every, out, display)
        with sweep.open_sweep(out, options.resume):
            outcome = sweep.run_cells(left, out, display)
            display.say("\n" + report(of_tables, out, options))
            return grids.conclude(outcome, started, out, "feddpms", display)


if __name__ == "__main__":
    cli.main(feddpms)
