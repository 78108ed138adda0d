r"""FedProx' synthetic(alpha, beta): softmax regression whose clients differ in models (alpha) and in inputs (beta).

Li et al., "Federated optimization in heterogeneous networks" (FedProx), MLSys 2020, arXiv:1812.06127, section 5.1 and
the authors' generate_synthetic.py.  Client k of 30 has  n_k = floor(exp(N(4, 4))) + 50  examples with inputs x and
labels argmax(W_k x + b_k):

    W_k, b_k ~ N(u_k, 1),  u_k ~ N(0, alpha^2);    x ~ N(v_k, diag(j^-1.2)),  v_k ~ N(B_k, 1),  B_k ~ N(0, beta^2)

in 60 dimensions (j: index of a dimension) and ten classes. Here a fifth of each client's examples are test examples.

python examples/fedprox_synthetic.py [--rounds 2] [--seeds 0]     zeta^2 of the paper's four data sets (figure 2)
python sweeps/run.py --data examples/fedprox_synthetic.py:Synthetic --data.alpha 1 --data.beta 1 --model linear \
    --partition by_group --client.lr 0.01 --measure.every 1

zeta^2 = 1/N sum_k |g_k - g|^2  is the dissimilarity of N clients with gradients g_k, whose unweighted mean is g. The
authors' code logs  1/N sum_k |g_k - g_w|^2 = zeta^2 + |g_w - g|^2  as "gradient difference";  g_w: mean of the g_k
weighted by numbers of examples.

Departs from the paper: no client has more than 3,000 examples; the paper's largest clients have more. The random draws
are different.
"""

import argparse
import json
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from fedcommons import experiment, numpy_generator, run

CLIENTS, DIMENSIONS, CLASSES, MOST = 30, 60, 10, 3000
DRAWS = {
    "iid": {"data.iid": True},
    "synthetic(0, 0)": {"data.alpha": 0.0, "data.beta": 0.0},
    "synthetic(0.5, 0.5)": {"data.alpha": 0.5, "data.beta": 0.5},
    "synthetic(1, 1)": {"data.alpha": 1.0, "data.beta": 1.0},
}
METHODS = {"FedAvg": {"algorithm": "fedavg"}, "FedProx, mu = 1": {"algorithm": "fedprox", "fedprox.mu": 1.0}}
FIELDS = {
    "data": f"{__file__}:Synthetic", "data.validation": 0.0, "data.limit": None, "partition.name": "by_group",
    "model": "linear", "sharing.setting": "real", "client.lr": 0.01, "client.batch_size": 10, "client.epochs": 20,
    "federation.participation": 1 / 3, "federation.weighting": "samples", "wandb": "off",
}  # fmt: skip
"""Settings of the paper: ten of thirty clients per round, 20 local epochs, batch size 10, learning rate 0.01."""


class Synthetic:
    """The data set synthetic(alpha, beta).

    Args:
        alpha: standard deviation, over clients k, of u_k, the mean of the weights of client k's model
        beta: standard deviation, over clients k, of B_k, around which the mean of client k's inputs is drawn
        iid: one model and one distribution of inputs for all clients; alpha and beta are not used
    """

    normalised = True  # The engine must accept the inputs although they are not scaled, as in the paper.

    def __init__(self, alpha: float = 1.0, beta: float = 1.0, iid: bool = False) -> None:
        draws = numpy_generator("fedprox synthetic")
        sizes = np.minimum(draws.lognormal(4, 2, CLIENTS).astype(int) + 50, MOST)
        spread = np.sqrt(np.arange(1, DIMENSIONS + 1) ** -1.2)
        common = draws.normal(0, 1, (DIMENSIONS + 1, CLASSES))
        parts = []
        for client, n in enumerate(sizes):
            u, b = draws.normal(0, alpha), draws.normal(0, beta)
            model = common if iid else draws.normal(u, 1, (DIMENSIONS + 1, CLASSES))
            centre = np.zeros(DIMENSIONS) if iid else draws.normal(b, 1, DIMENSIONS)
            x = centre + spread * draws.standard_normal((n, DIMENSIONS))
            y = (x @ model[:-1] + model[-1]).argmax(1)
            parts.append((x, y, np.full(n, client), np.arange(n) < n // 5))
        x, y, clients, is_test = (np.concatenate(column) for column in zip(*parts, strict=True))
        self.n_classes = CLASSES
        self.train, self.test = (
            {"x": x[some].astype(np.float32), "y": y[some], "groups": clients[some]} for some in (~is_test, is_test)
        )


def zeta(draw: str, method: str, seed: int, rounds: int) -> tuple[float, float, float]:
    """Return zeta^2 (client dissimilarity) before and after training on data set ``draw``, and the last accuracy."""
    values = {**FIELDS, **DRAWS[draw], **METHODS[method], "federation.rounds": rounds, "measure.every": rounds}
    with TemporaryDirectory() as folder:
        run(experiment("smoke", values={**values, "seed": seed}), Path(folder, "run"), say=lambda text: None)
        lines = [
            json.loads(line) for line in Path(folder, "run", "rounds.jsonl").read_text(encoding="utf-8").splitlines()
        ]
    first, last = (line["convergence/zeta_sq"] for line in (lines[0], lines[-1]))
    return first, last, lines[-1]["test/accuracy"]


def main() -> None:
    parser = argparse.ArgumentParser(description="zeta^2 of FedProx' synthetic data")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--seeds", default="0")
    options = parser.parse_args()
    print(f"| clients | method | zeta^2 before | after round {options.rounds} | accuracy, % |\n|---|---|---|---|---|")
    for draw in DRAWS:
        for method in METHODS:
            runs = [zeta(draw, method, int(seed), options.rounds) for seed in options.seeds.split(",")]
            before, after, accuracy = np.array(runs).T
            print(
                f"| {draw} | {method} | {before.mean():.3g} | {after.mean():.3g} ({after.min():.3g} to "
                f"{after.max():.3g}) | {100 * accuracy.mean():.1f} ({100 * accuracy.min():.1f} to "
                f"{100 * accuracy.max():.1f}) |"
            )


if __name__ == "__main__":
    main()
