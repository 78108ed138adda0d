"""Table 3 of FedDM: how many numbers all clients upload in a round, from partitions alone (no data files, no training).

python sweeps/message_sizes.py                   # 200 partitions of each of ten settings, some seconds
python sweeps/message_sizes.py --partitions 20
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import numpy as np

from fedcommons.cli import parse
from fedcommons.reports import tables
from fedcommons.storage.atomic_files import write_text
from fedcommons.tune import sweep_folder

MNIST_CLASSES = [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]
DATA = {"MNIST": (784, 10, MNIST_CLASSES), "CIFAR-10": (3072, 10, [5000] * 10), "CIFAR-100": (3072, 5, [500] * 100)}
"""Numbers in an image, the paper's synthetic images per class (ipc), and training images of each class."""
PUBLISHED = {
    ("MNIST", 10): {0.5: 635_040, 0.1: 368_480, 0.01: 109_760},
    ("CIFAR-10", 10): {0.5: 2_672_640, 0.1: 1_351_680, 0.01: 460_800},
    ("CIFAR-100", 10): {0.5: 10_045_440, 0.1: 4_761_600, 0.01: 2_135_040},
    ("CIFAR-10", 50): {0.5: 3_100_000},  # text of appendix C, rounded
}
"""Uploaded numbers in the paper, by data set, number of clients and alpha."""


def arguments(argv: Sequence[str]) -> parse.Options:
    parser = parse.Parser(description=__doc__)
    parser.add_options((
        ("partitions", Annotated[int, "[40, 100000]"], 200, "partitions of each setting; their seeds are 0, 1, ..."),
        ("out", str, "runs/message-sizes", "folder of the results"),
        ("dry-run", bool, False, "say what would be computed, and stop"),
    ))  # fmt: skip
    return parse.parse(parser, argv)


def uploaded(data: str, n_clients: int, alpha: float, seed: int) -> int:
    """Return the numbers that all clients of a partition upload: ipc images of each class that a client sends."""
    import torch

    from fedcommons.algorithms.feddm import FedDM
    from fedcommons.algorithms.feddm_matching import is_owned
    from fedcommons.runs.load_data import partition_rows

    numbers, ipc, sizes = DATA[data]
    labels = np.repeat(np.arange(len(sizes)), sizes)
    constants = {"alpha": alpha}
    counts = partition_rows("dirichlet_niid", constants, labels, len(sizes), seed, n_clients=n_clients).class_counts
    return numbers * ipc * int(is_owned(torch.as_tensor(counts), FedDM.least).sum())


def message_sizes(argv: Sequence[str]) -> int:
    options = arguments(argv)
    settings = [(*key, alpha, value) for key, by_alpha in PUBLISHED.items() for alpha, value in by_alpha.items()]
    out = Path(options.out)
    if options.dry_run:
        print(f"{out}: {len(settings)} settings of {options.partitions} partitions to compute")
        return 0
    rows = []
    with sweep_folder.open_folder(out):
        for data, n_clients, alpha, published in settings:
            sizes = [uploaded(data, n_clients, alpha, seed) for seed in range(options.partitions)]
            low, high = np.quantile(sizes, (0.025, 0.975))
            rows.append(
                {"data": data, "clients": n_clients, "alpha": alpha, "paper": published, "mean": round(np.mean(sizes)),
                 "2.5 %": round(low), "97.5 %": round(high), "inside": "yes" if low <= published <= high else "no"}
            )  # fmt: skip
        table = tables.markdown(list(rows[0]), [list(row.values()) for row in rows])
        write_text(out / "message_sizes.md", table)
        write_text(out / "message_sizes.csv", tables.to_csv(rows))
    print(f"{table}\n{out}")
    return 0


if __name__ == "__main__":
    parse.main(message_sizes, resumes=False)
