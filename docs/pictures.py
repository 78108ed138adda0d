"""The pictures of docs/ideas, from real partitions of the 1,295 training digits by the package's code.

python docs/pictures.py [NAME ...]      all of them, or those; two calls write the same bytes
"""

import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.axes import Axes

from fedcommons import Experiment, experiment
from fedcommons.convergence import per_sample
from fedcommons.federation.client_sampling import participants
from fedcommons.generators.requests import contributions
from fedcommons.reports.plots import finish, panels, save
from fedcommons.reports.series import COLOURS
from fedcommons.runs import load_data
from fedcommons.runs.assemble import assemble
from fedcommons.runs.build import build, load, module_of
from fedcommons.seeding import set_default_generator
from fedcommons.sharing.swapped import n_swapped

HERE = Path(__file__).parent / "ideas"
BLUE, RED, GREY = COLOURS[0], COLOURS[1], "0.75"
OFF = {"wandb": "off"}


def counts(name: str = "dirichlet_classes", dataset: str = "digits", **constants: Any) -> np.ndarray:
    """Training examples of each class at each client, (clients, classes)."""
    fields = {f"partition.{key}": value for key, value in constants.items()}
    config = experiment("small", dataset, {"partition": name, **OFF, **fields})
    data = load(config.data)
    train = data.train
    groups = None if train.groups is None else train.groups.numpy()
    factors = {factor: values.numpy() for factor, values in train.factors.items()}
    p = config.partition
    client_data = load_data.partition_rows(
        p.name, p.constants, train.y.numpy(), data.n_classes, 0, n_clients=p.n_clients, groups=groups, factors=factors,
        origin=data.origin,
    )  # fmt: skip
    assert client_data.class_counts is not None
    return client_data.class_counts


def bubbles(axes: Axes, by_client: np.ndarray, title: str) -> None:
    """A disc for each client and class; its area is the number of examples."""
    client, label = np.nonzero(by_client)
    size = np.maximum(220 * by_client[client, label] / 129, 4)  # one image is visible as well
    axes.scatter(client, label, s=size, color=BLUE, linewidths=0)
    axes.set(title=title, xlabel="client", xlim=(-0.7, len(by_client) - 0.3), ylim=(-0.7, by_client.shape[1] - 0.3))
    axes.title.set_fontsize(10)
    axes.set_xticks(range(0, len(by_client), 1 if len(by_client) <= 12 else 10))
    axes.set_yticks(range(by_client.shape[1]))


def row_of_partitions(path: Path, by_client: Mapping[str, np.ndarray], title: str) -> None:
    figure, (row,) = panels(1, len(by_client), (3.1 * len(by_client), 3.3), sharey=True)
    for axes, (name, numbers) in zip(row, by_client.items(), strict=True):
        bubbles(axes, numbers, name)
    row[0].set_ylabel("class")
    most = max(numbers.max() for numbers in by_client.values())
    figure.suptitle(f"{title}\narea of a disc: a client's images of a class, up to {most}", fontsize=10)
    save(figure, path, 110)


def alpha() -> None:
    by_client = {f"alpha = {a:g}": counts(alpha=a) for a in (0.01, 0.1, 1, 100)}
    row_of_partitions(HERE / "alpha.png", by_client, "alpha: the smaller, the more clients differ (digits, N = 10)")


def n() -> None:
    by_client = {f"N = {n}": counts(n_clients=n) for n in (4, 10, 40)}
    row_of_partitions(
        HERE / "n.png", by_client, "N: the same 1,295 images, partitioned among more clients (digits, alpha = 0.1)"
    )


def c() -> None:
    figure, (row,) = panels(1, 3, (9.3, 3.1), sharey=True)
    for axes, share in zip(row, (0.2, 0.5, 1.0), strict=True):
        pairs = [(r, i) for r in range(1, 13) for i in participants(10, share, 0, r)]
        axes.scatter(*zip(*pairs, strict=True), marker="s", s=70, color=BLUE)
        axes.set(title=f"C = {share:g}: {int(10 * share)} of 10 take part", xlabel="round", xticks=range(1, 13, 2))
        axes.title.set_fontsize(10)
    row[0].set(ylabel="client", yticks=range(10))
    figure.suptitle("C: share of the clients that train in a round; square: the client trains", fontsize=10)
    save(figure, HERE / "c.png", 110)


def steps(path: Path, title: str, courses: Mapping[str, tuple[int, int]]) -> None:
    """A client with 129 images: each step of a round as a bar as wide as its batch. courses: label to (E, B)."""
    figure, ((axes,),) = panels(1, 1, (8, 1.3 + 0.55 * len(courses)))
    for y, (epochs, batch) in enumerate(courses.values()):
        for epoch in range(epochs):
            starts = np.arange(0, 129, batch)
            seen = np.minimum(batch, 129 - starts)  # below: a gap of 3 between steps; a step of one image is visible
            axes.barh(y, np.maximum(seen - 3, 2.5), 0.6, left=129 * epoch + starts - 1.5 * (seen < 3),
                      color=BLUE if epoch % 2 == 0 else "#8fb4d6")  # fmt: skip
        axes.text(129 * epochs + 8, y, f"{epochs * -(-129 // batch)} steps", va="center", fontsize=9)
    axes.set(yticks=range(len(courses)), yticklabels=list(courses), xlabel="images processed by the client")
    axes.set_xlim(0, 129 * max(e for e, _ in courses.values()) * 1.13)
    axes.invert_yaxis()
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_title(f"{title}\nbar: a step, as wide as its batch; shade: an epoch", fontsize=10)
    save(figure, path, 110)


def e() -> None:
    steps(HERE / "e.png", "E: passes over a client's 129 images in a round (B = 32)",
          {f"E = {e}": (e, 32) for e in (1, 2, 4)})  # fmt: skip


def b() -> None:
    steps(HERE / "b.png", "B: images in a step (E = 2, a client with 129 images)",
          {f"B = {b}": (2, b) for b in (10, 32, 129)})  # fmt: skip


def p() -> None:
    shares = (0.0, 0.1, 0.3, 0.5)
    config = experiment("small", "digits", {"alpha": 0.1, "setting": "shuffled_synthetic", **OFF})
    client_data = build(config).client_data
    n_own = client_data.clients.sizes[0]
    figure, (row,) = panels(1, 2, (9.3, 3), sharey=True)
    n_synthetic = [contributions(share, client_data)[0] if share else 0 for share in shares]
    swapped = [n_swapped(share, n_own) for share in shares]
    for axes, real, others, title, name in (
        (row[0], [n_own] * 4, n_synthetic, "shuffled_synthetic: images join", "from the pool of synthetic images"),
        (
            row[1],
            [n_own - s for s in swapped],
            swapped,
            "shuffled_real: images are swapped",
            "from the pool of real images",
        ),
    ):
        axes.barh(range(4), real, 0.6, color=BLUE, label="the client's own real images")
        axes.barh(range(4), others, 0.6, left=real, color=RED, label=name)
        for y, (first, second) in enumerate(zip(real, others, strict=True)):
            axes.text(first + second + 5, y, f"{second} of {first + second}", va="center", fontsize=9)
        axes.set(title=title, xlabel="images that the client trains on", xlim=(0, 320), yticks=range(4),
                 yticklabels=[f"p = {share:g}" for share in shares])  # fmt: skip
    finish(figure, f"p: share of shared images among the images that a client with {n_own} images trains on")
    save(figure, HERE / "p.png", 110)


def rho() -> None:
    shares = (0.25, 0.75, 1.0)
    figure, ((axes,),) = panels(1, 1, (8, 2.5))
    seen = []
    for share in shares:
        values = {"alpha": 0.1, "setting": "shuffled_synthetic", "rho": share, **OFF}
        seen.append(len(build(experiment("small", "digits", values)).requests[0].examples))
    axes.barh(range(3), seen, 0.6, color=BLUE, label="the client's generator is trained on")
    axes.barh(range(3), [129 - s for s in seen], 0.6, left=seen, color=GREY, label="the generator never sees")
    for y, some in enumerate(seen):
        axes.text(131, y, f"{some} of 129", va="center", fontsize=9)
    axes.set(xlabel="real images of one client", yticks=range(3), yticklabels=[f"rho = {s:g}" for s in shares],
             xlim=(0, 150))  # fmt: skip
    finish(figure, "rho: share of a client's images that its generator sees", "real images that")
    save(figure, HERE / "rho.png", 110)


def zeta() -> None:
    """Gradients of the untrained linear model, in the plane where those of clients on real data vary most."""
    both: dict[str, list[np.ndarray]] = {}
    for setting, share in (("real", None), ("shuffled_real", 0.5)):
        values = {"alpha": 0.1, "setting": setting, "partition.n_clients": 5, "model": "linear", **OFF}
        both[setting] = gradients(experiment("small", "digits", values | ({"p": share} if share else {})))
    means = np.stack([gradient.mean(0) for gradient in both["real"]])
    plane = np.linalg.svd(means - means.mean(0), full_matrices=False)[2][:2]
    figure, (row,) = panels(1, 2, (9.3, 4.2), sharey=True)
    titles = {
        "real": "own real data: zeta_sq",
        "shuffled_real": "training data, half of them swapped: zeta_hat_sq",
    }
    for axes, (setting, each) in zip(row, both.items(), strict=True):
        at = np.stack([gradient.mean(0) for gradient in each])
        zeta_sq = float(((at - at.mean(0)) ** 2).sum(1).mean())
        sigma_sq = float(np.mean([((gradient - gradient.mean(0)) ** 2).sum(1).mean() for gradient in each]))
        for client, gradient in enumerate(each):
            points, (mean,) = gradient @ plane.T, gradient.mean(0, keepdims=True) @ plane.T
            axes.scatter(*points.T, s=5, color=COLOURS[client], alpha=0.35, linewidths=0)
            axes.scatter(*mean, s=130, marker="*", color=COLOURS[client], edgecolor="k", zorder=3)
        axes.scatter(*(at.mean(0) @ plane.T), s=70, marker="X", color="k", zorder=4)
        axes.set_title(f"{titles[setting]}\nzeta^2 {zeta_sq:.2f}, sigma^2 {sigma_sq:.2f}", fontsize=10)
        axes.set_xlabel("first direction of the gradient")
    row[0].set_ylabel("second direction")
    meaning = "colour: client; dot: gradient of an image; star: mean of a client; cross: mean of the stars"
    figure.suptitle(meaning, fontsize=10)
    save(figure, HERE / "zeta.png", 110)


def gradients(config: Experiment) -> list[np.ndarray]:
    """The gradient of each example that each client trains on, (n, P), at the untrained model."""
    built = assemble(build(config))
    module, clients = module_of(config)(built.spec.facts), built.data.clients
    batches = [(clients[i].x.split(1), clients[i].y.split(1)) for i in range(len(clients))]
    return [torch.stack([per_sample.gradients(module, pair)[0] for pair in zip(x, y, strict=True)]).double().numpy()
            for x, y in batches]  # fmt: skip


def partitions() -> None:
    """A picture for each partition, digits and N = 10 where it can be."""
    names = {
        "iid": {}, "dirichlet_classes": {}, "dirichlet_niid": {}, "dirichlet_clients": {},
        "dirichlet_clients_all": {}, "dirichlet_plain": {}, "single_class": {}, "shards": {}, "quantity": {},
        "labels_lognormal": {},
    }  # fmt: skip
    for name, constants in names.items():
        draw(name, counts(name, **constants), "digits")
    draw("by_group", counts("by_group", "examples/hospitals.py:Patients"), "hospitals' patients")
    draw("by_factor", counts("by_factor", "procedural_sprites", factor="quadrant_shape"), "procedural_sprites")


def draw(name: str, by_client: np.ndarray, data: str) -> None:
    figure, ((axes,),) = panels(1, 1, (5.4, 3.2))
    scaled = by_client * (129 / max(129, by_client.max()))
    bubbles(axes, scaled, f"{name}, {data}\narea of a disc: a client's examples of a class, up to {by_client.max()}")
    axes.set_ylabel("class")
    save(figure, HERE / f"partition_{name}.png", 100)


PICTURES: Mapping[str, Callable[[], None]] = {
    "alpha": alpha, "n": n, "c": c, "e": e, "b": b, "p": p, "rho": rho, "zeta": zeta, "partitions": partitions,
}  # fmt: skip

if __name__ == "__main__":
    os.chdir(Path(__file__).parent.parent)  # what a data set of our own draws is keyed by the path that names it
    set_default_generator(0)
    torch.set_num_threads(1)
    for name in sys.argv[1:] or PICTURES:
        PICTURES[name]()
