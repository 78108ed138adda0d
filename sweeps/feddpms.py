"""Tables 1, 2, 5, 6 and figures 2, 3 of FedDPMS: accuracy and cost of images decoded from other clients' noisy codes.

python sweeps/feddpms.py                     # digits, some minutes on a laptop
python sweeps/feddpms.py --preset smoke      # the same code with smaller numbers, under a minute
python sweeps/feddpms.py --alphas 0.1,0.3,0.5 --clients 10:430,20:860,30:1290 --preliminary 0.3,0.4,0.5
python sweeps/feddpms.py --dataset fmnist --data-dir DIR      # a subset of Fashion-MNIST
python sweeps/feddpms.py --preset paper --dataset fmnist --data-dir DIR      # the paper's numbers, for GPUs
python sweeps/feddpms.py --preset authors --dataset cifar10 --data-dir DIR   # as the authors' released code runs it

``--clients``: pairs of a number of clients and the number of all their images. ``--preliminary``: shares of the rounds
that belong to stage I. With several ``--lrs``, each row has the learning rate with the best validation accuracy on the
seeds of --tuning-seeds.
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import product
from typing import Any

from fedcommons.cli import parse
from fedcommons.tune import grid, learning_rates, sweep
from fedcommons.tune.study import Entry, Report, Results, Study
from papers.feddpms import presets

ALGORITHMS = "feddpms,fedvae,fedavg,fedprox,moon,fedmix"
AUTOENCODERS = ("feddpms", "fedvae")
CONSTANTS: Mapping[str, tuple[str, Callable[[str], Any]]] = {
    "sigmas": ("sigma", float), "quotas": ("quota", int), "privacies": ("privacy", str), "helpers": ("helpers", int),
}  # fmt: skip
"""Options of table 5, each with the constant of FedDPMS that it varies and the type of the values."""


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
        learning_rates.OPTION,
        ("clients", str, ",".join(f"{n}:{500 * n}" for n in range(10, 60, 10)) if hundred else "",
         "table 2: pairs N:images, the number of clients and of all their images, at the first alpha"),
    )  # fmt: skip
    defaults = {"algorithms": ALGORITHMS, "settings": "real", "alphas": "0.5"}
    parser = grid.parser(__doc__, argv, defaults, more, "feddpms", presets.fields(preset, dataset))
    options = parse.parse(parser, argv)
    grid.refuse_fields(options, {} if options.lrs is None else {"client.lr": "lrs"})
    grid.require_validation(options, "lrs")
    learning_rates.tuning_seeds(options)
    return options


def entries(options: parse.Options) -> list[Entry]:
    """Return an entry for each table (label ``table``), method and seed, after entries that choose learning rates.

    Each trial is once in a table. All methods train the same encoder; some methods add a decoder.
    """
    result, seeds = list[Entry](), learning_rates.tuning_seeds(options)
    algorithms, alphas = grid.values(options, "algorithms"), grid.values(options, "alphas", float)
    rates = [options.client.lr] if options.lrs is None else grid.values(options, "lrs", float)

    def add(table: str, algorithm: str, alpha: float, **fields: Any) -> None:
        row = {"algorithm": algorithm, "partition.alpha": alpha, "sharing.setting": "real", **fields}
        if "model.name" not in options.asked:
            row["model.name"] = "vae" if algorithm in AUTOENCODERS else "encoder"
        varied = ", ".join(f"{name} {value}" for name, value in fields.items())
        labels = {"table": table, "line": f"{table}: {algorithm}, alpha {alpha:g}{f', {varied}' * bool(varied)}"}
        result.extend(learning_rates.of_row(options, labels, row, "client.lr", rates, seeds))

    for alpha, algorithm in product(alphas, algorithms):
        add("Table 1", algorithm, alpha)
    federations = grid.pairs(options, "clients", (int, int), "N:images such as 10:430") if options.clients else ()
    for (n, images), algorithm in product(federations, algorithms):
        add("Table 2", algorithm, alphas[0], **{"partition.n_clients": n, "data.limit": images})
    receives = grid.listed(options, "receives")
    for alpha in alphas if receives else ():
        add("Ablations", "fedavg", alpha)
        for name in receives:
            add("Ablations", "feddpms", alpha, **{"feddpms.receive": name})
    for option, (field, kind) in CONSTANTS.items():
        for value in grid.listed(options, option, kind):
            add("Table 5", "feddpms", alphas[0], **{f"feddpms.{field}": value})
    for share in grid.listed(options, "preliminary", float, "[0, 1)"):
        rounds = _preliminary(share, options.federation.rounds)
        add("Figure 3", "feddpms", alphas[0], **{"feddpms.preliminary_rounds": rounds})
    sweep.require_few(len(result))
    return list({(e["table"], e.cell.name): e for e in result}.values())


def _preliminary(share: float, rounds: int) -> int | None:
    """Return ``share`` of the rounds as the number of rounds of stage I; None for the default share, 0.4."""
    last = round(share * rounds)
    return None if last == round(0.4 * rounds) else last


def render(results: Results) -> Report:
    from papers.feddpms.tables import report

    return report(results)


feddpms = Study("feddpms", arguments, entries, render, learning_rates.play, plan=learning_rates.plan)

if __name__ == "__main__":
    parse.main(feddpms)
