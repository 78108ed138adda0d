"""Tables 1, 2, 5, 6 and figures 2, 3 of FedDPMS: accuracy and cost of images decoded from other clients' noisy codes.

python sweeps/feddpms.py                     # digits, some minutes on a laptop
python sweeps/feddpms.py --preset smoke      # the same code with smaller numbers, under a minute
python sweeps/feddpms.py --alphas 0.1,0.3,0.5 --clients 10:430,20:860,30:1290 --preliminary 0.3,0.4,0.5
python sweeps/feddpms.py --dataset fmnist --data-dir DIR      # a subset of Fashion-MNIST
python sweeps/feddpms.py --preset paper --dataset fmnist --data-dir DIR      # the paper's numbers, for GPUs
python sweeps/feddpms.py --preset authors --dataset cifar10 --data-dir DIR   # as the authors' released code runs it

``--clients``: pairs of a number of clients and the number of all their images. ``--preliminary``: shares of the rounds
that belong to stage I.
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import product
from typing import Any

from fedcommons.cli import parse
from fedcommons.tune import grid, sweep
from fedcommons.tune.study import Entry, Report, Results, Study
from papers.feddpms import presets

ALGORITHMS = "feddpms,fedvae,fedavg,fedprox,moon,fedmix"
AUTOENCODERS = ("feddpms", "fedvae")
CONSTANTS: Mapping[str, tuple[str, Callable[[str], Any]]] = {
    "sigmas": ("sigma", float), "quotas": ("quota", int), "privacies": ("privacy", str), "helpers": ("helpers", int),
    "preliminary": ("preliminary_rounds", float),
}  # fmt: skip
"""Options of table 5 and figure 3, each with the constant of FedDPMS that it varies and the type of the values."""


def arguments(argv: Sequence[str]) -> parse.Options:
    preset, dataset = grid.preset_and_dataset(argv)
    few, hundred = preset == "smoke", preset in ("paper", "authors") and dataset == "cifar100"
    more = (
        ("sigmas", str, "1" if few else "0.5,1,2,4", "table 5: noise levels; empty for none, as in the options below"),
        ("quotas", str, "2" if few else "2,5,10,20", "table 5: numbers of codes per class"),
        ("preliminary", str, "", "figure 3: shares of the rounds that belong to stage I, such as 0.3,0.4,0.5"),
        ("privacies", str, "", "table 5: variants of the noise: paper, sound, or both"),
        ("helpers", str, "", "table 5: largest numbers of clients whose codes a client receives"),
        ("receives", str, "decoded,real,nothing" if preset == "small" else "",
         "ablations at every alpha, compared with FedAvg: decoded, real, nothing; empty for none"),
        ("lrs", str | None, None, "learning rates to choose from by validation accuracy; default: client.lr alone"),
        ("clients", str, ",".join(f"{n}:{500 * n}" for n in range(10, 60, 10)) if hundred else "",
         "table 2: pairs N:images, the number of clients and of all their images, at the first alpha"),
    )  # fmt: skip
    defaults = {"algorithms": ALGORITHMS, "settings": "real", "alphas": "0.5"}
    parser = grid.parser(__doc__, argv, defaults, more, "feddpms", presets.fields(preset, dataset))
    options = parse.parse(parser, argv)
    grid.refuse_fields(options, {} if options.lrs is None else {"client.lr": "lrs"})
    grid.require_validation(options, "lrs")
    return options


def entries(options: parse.Options) -> list[Entry]:
    """Return the entries of each table (label ``table``), each trial once per table."""
    algorithms, alphas = grid.values(options, "algorithms"), grid.values(options, "alphas", float)
    tables = {"Table 1": [c for alpha, a in product(alphas, algorithms) for c in _cells(options, a, alpha)]}
    federations = grid.pairs(options, "clients", (int, int), "N:images such as 10:430") if options.clients else ()
    tables["Table 2"] = [
        cell
        for (n, images), a in product(federations, algorithms)
        for cell in _cells(options, a, alphas[0], {"partition.n_clients": n, "data.limit": images})
    ]
    receives = grid.listed(options, "receives")
    ablated = [("fedavg", {}), *(("feddpms", {"feddpms.receive": name}) for name in receives)] if receives else []
    tables["Ablations"] = [c for alpha, (a, more) in product(alphas, ablated) for c in _cells(options, a, alpha, more)]
    tables |= {"Table 5": [], "Figure 3": []}
    for option, (field, kind) in CONSTANTS.items():
        of_rounds = option == "preliminary"
        for value in grid.listed(options, option, kind, "[0, 1)" if of_rounds else ""):
            value = _preliminary(value, options.federation.rounds) if of_rounds else value
            tables["Figure 3" if of_rounds else "Table 5"] += _cells(
                options, "feddpms", alphas[0], {f"feddpms.{field}": value}
            )
    return [Entry(cell, {"table": table}) for table, cells in tables.items() for cell in grid.once(cells)]


def _preliminary(share: float, rounds: int) -> int | None:
    """Return ``share`` of the rounds as the number of rounds of stage I; None for the default share, 0.4."""
    last = round(share * rounds)
    return None if last == round(0.4 * rounds) else last


def _cells(
    options: parse.Options, algorithm: str, alpha: float, values: Mapping[str, Any] | None = None
) -> list[sweep.Trial]:
    """Return a trial per learning rate and seed. All methods train the same encoder; some methods add a decoder."""
    model = "vae" if algorithm in AUTOENCODERS else "encoder"
    field = {} if "model.name" in options.asked else {"model.name": model}
    rates = [options.client.lr] if options.lrs is None else grid.values(options, "lrs", float)
    fixed = {"algorithm": algorithm, "partition.alpha": alpha, "sharing.setting": "real", **field, **(values or {})}
    seeds = grid.values(options, "seeds", int)
    sweep.require_few(len(rates) * len(seeds) * len(options.alphas.split(",")))
    every = {**grid.base(options), **fixed}
    return [grid.cell(options, {**every, "client.lr": rate, "seed": seed}) for rate, seed in product(rates, seeds)]


def render(results: Results) -> Report:
    from papers.feddpms.tables import report

    return report(results)


feddpms = Study("feddpms", arguments, entries, render)

if __name__ == "__main__":
    parse.main(feddpms)
