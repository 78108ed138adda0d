"""Raw copies and approximate gradient coding for a linear softmax model; many repetitions run as one batch.

x_j, y_j  M images as rows of pixels with an appended 1 for the bias, and their labels          (M, D), (M,)
W         server model, one per repetition; starts with the initial weights of ``nn.Linear``        (D, K)
p_j       softmax(x_j W) - onehot(y_j);  the gradient of example j's cross-entropy is  g_j = x_j^T p_j
N, q      number of clients, equal to that of classes; each straggles in a round with probability q in [0, 1)
c, d      share of non-private examples, in [0, 1]; number of other clients that get a copy of each such example
d_j       number of clients that hold example j, owner included;  v_ij = 1/d_j if client i holds it, else 0     (N, M)
z_i       1 if client i answers in a round, 0 if it straggles

A round:  W <- W - lr g^,  g^ = 1/((1-q) M) sum_i z_i sum_j v_ij g_j,  an unbiased estimate g^ of the mean gradient.
The learning rate lr is multiplied by ``decay`` after a round with an answer; a round without answers changes nothing.

Every model stays W_0 + sum_j x_j^T a_j. So a repetition needs only its (M, K) coefficients a, and its logits are
X W_0 + G a  with the matrix of scalar products  G = X X^T,  which all repetitions share: one large product per round.
The second moment E||g^||^2 needs the scalar products of the clients' coded gradients sum_j v_ij g_j, which are
V H V^T  with  H_jl = <g_j, g_l> = G_jl <p_j, p_l>.  Each draw of stragglers then costs a product with an (N, N) matrix.

Models are float64: raw pixels, 0 to 255, make G as large as 5e7 and a step larger than the model, so that float32
rounding would change single repetitions. Test logits and second moments, which do not influence the model, are float32.
This halves the time and changes the means of both by less than 1e-5 of their values.

Source: Makkonen, Niemelä, Hollanti and Kas Hanna, "Approximate gradient coding for privacy-flexible federated learning
with non-IID data", arXiv:2404.03524, section IV, figures 1 to 3.
Departs from the paper: clients estimate the mean gradient, as in the authors' code; equations 2 and 3 have the sum,
whose second moment is M^2 times as large. Each example goes to d different clients (``exact``). The paper's text also
states that every other client gets it with probability d/(N-1) (``binomial``), but the paper's d_j = d + 1 holds only
for ``exact``.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from math import inf

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedcommons.config.schema import Partition
from fedcommons.data.examples import Dataset, Examples
from fedcommons.errors import UserError
from fedcommons.runs import load_data
from fedcommons.runtime.torch_settings import without_denormals
from fedcommons.seeding import numpy_generator, seed_for, set_default_generator
from fedcommons.sharing.swapped import n_swapped

PARTITIONS = {"iid": {}, "dirichlet_plain": {"alpha": 0.1}, "single_class": {}}  # partitions with their constants
STRAGGLER_DRAWS = 15  # draws per round that the second moment is averaged over, as in the authors' code

BLOCK = 50
"""Number of repetitions in one batch, so that the batch fits into the cache. It changes the rounding of sums."""


@dataclass(frozen=True)
class Setting:
    """The setting of one curve.

    q: probability that a client straggles in a round. c: share of the examples that is not private. d: number of other
    clients that get a copy of each such example. per_class: take the share c of each class (True) or of all examples
    together (False). sharing: the variant of ``copies``. decay: factor of the learning rate lr after each round.
    """

    partition: str
    q: float
    d: int
    c: float
    sharing: str = "exact"
    per_class: bool = False
    lr: float = 0.1
    decay: float = 0.97
    rounds: int = 50


@dataclass(frozen=True)
class Problem:
    """Images, each with a 1 appended to its pixels, and their scalar products; all repetitions share them."""

    x: Tensor  # (M images, D pixels including the appended 1)
    y: Tensor  # labels, (M images,)
    test_x: Tensor  # (T test images, D pixels including the appended 1)
    test_y: Tensor  # labels, (T test images,)
    n_classes: int
    products: Tensor  # G = x x^T, (M images, M images)
    test_products: Tensor  # test_x x^T, (T, M); its number type is that of test logits and second moments

    @staticmethod
    def build(
        train: Examples, test: Examples, n_classes: int, white: float, measured: torch.dtype = torch.float32
    ) -> "Problem":
        """Build the problem. white: value of a white pixel; measured: type of test logits and second moments."""
        x, test_x = (F.pad(part.x.flatten(1).double() * (white / 255), (0, 1), value=1.0) for part in (train, test))
        return Problem(x, train.y, test_x, test.y, n_classes, x @ x.T, (test_x @ x.T).to(measured))


@dataclass(frozen=True)
class Draws:
    """All random draws of one repetition of an experiment."""

    start: Tensor  # initial weights, (D pixels and bias, K classes)
    holds: np.ndarray  # (clients N, examples M) bool: client holds example; N excludes clients without examples
    answers: np.ndarray  # (rounds, clients N) bool: client answers in the round
    sampled: np.ndarray  # further draws of ``answers``, (rounds, STRAGGLER_DRAWS, clients N), for E||g^||^2


@dataclass(frozen=True)
class Played:
    """Results of each repetition (rows) before each round (columns); column 0 belongs to the untrained model.

    g_j: gradient of example j. same_class: sum of <g_j, g_l> over all pairs (j, l) of examples of one class, including
    j = l. cross_class: this sum over pairs of two classes. The two sums add up to ||sum_j g_j||^2.
    """

    accuracy: np.ndarray  # on the test images, in [0, 1]
    second_moment: np.ndarray  # ||g^||^2 of the gradient estimate g^, mean over draws of stragglers
    same_class: np.ndarray
    cross_class: np.ndarray


def select_examples(dataset: Dataset, per_class: int, first: bool, seed: int) -> Examples:
    """Select ``per_class`` training images of every class: the first images, or random images."""
    y, rows = dataset.train.y.numpy(), []
    for c in range(dataset.classes):
        of_class = np.flatnonzero(y == c)
        if len(of_class) < per_class:
            raise UserError(
                f"gradient coding takes {per_class} training images of every class, and {dataset.name} has "
                f"{len(of_class)} of class {c}; name another data set."
            )
        random_rows = numpy_generator(seed, "images of class", c).choice(of_class, per_class, replace=False)
        rows.append(of_class[:per_class] if first else random_rows)
    return dataset.train[np.sort(np.concatenate(rows))]


def check(setting: Setting, n_clients: int, sizes: Sequence[int]) -> None:
    """Check that a setting can run with n_clients clients; sizes: the number of examples of each class."""
    lowest = min(sizes) if setting.per_class else sum(sizes)
    if not 1 <= setting.d < n_clients:
        raise UserError(
            f"d, the number of copies, must be in [1, {n_clients - 1}] for {n_clients} clients, got {setting.d}."
        )
    if setting.c > 0 and n_swapped(setting.c, lowest) == 0:
        whose = "a class" if setting.per_class else "all examples"
        raise UserError(f"c = {setting.c:g} of {whose}, {lowest} images, is less than one image; use 0 or a larger c.")


def copies(owner: np.ndarray, shared: np.ndarray, d: int, keys: np.ndarray, variant: str) -> np.ndarray:
    """Return (N, M) bool: whether client i holds example j after copies are shared.

    owner: (M,) client to which the partition assigns an example; shared: (M,) bool, whether the example is not private.
    keys: (M, N) random numbers, uniform in [0, 1). variant ``exact``: the d other clients with the smallest keys get a
    copy (all other clients if fewer than d). variant ``binomial``: other clients with a key below d/(N-1) get a copy.
    """
    m, n = keys.shape
    others = np.where(np.arange(n) == owner[:, None], inf, keys)
    gets = others.argsort(1).argsort(1) < min(d, n - 1) if variant == "exact" else others < d / (n - 1)
    holds = gets & shared[:, None]
    holds[np.arange(m), owner] = True
    return holds.T


def draw(problem: Problem, setting: Setting, repetition: int, seed: int) -> Draws:
    """Draw partition, copies, stragglers and initial weights of one repetition.

    The random numbers do not depend on c (share of copied examples), d (copies), q (probability to straggle) or the
    partition. Clients without examples, which the Dirichlet partition drops, do not change the draws of other clients.
    """
    labels, n_classes, rounds = problem.y.numpy(), problem.n_classes, setting.rounds
    recipe = Partition(setting.partition, n_clients=n_classes, constants=PARTITIONS[setting.partition])
    own_seed = seed_for(seed, "repetition", repetition)
    rows = load_data.partition_rows(
        recipe.name, recipe.constants, labels, n_classes, own_seed, n_clients=recipe.n_clients
    ).rows
    owner = np.empty(len(labels), dtype=np.int64)
    for client, of_client in enumerate(rows):
        owner[of_client] = client
    rng = numpy_generator(seed, "sharing", repetition)
    order, keys = rng.permutation(len(labels)), rng.random((len(labels), n_classes))
    groups = [order[labels[order] == c] for c in range(n_classes)] if setting.per_class else [order]
    shared = np.zeros(len(labels), dtype=bool)
    for group in groups:
        shared[group[: n_swapped(setting.c, len(group))]] = True
    holds = copies(owner, shared, setting.d, keys[:, : len(rows)], setting.sharing)
    luck = numpy_generator(seed, "stragglers", repetition).random((rounds, 1 + STRAGGLER_DRAWS, n_classes))
    answers = luck[..., : len(rows)] >= setting.q
    with torch.random.fork_rng(devices=()):
        set_default_generator(seed, "start", repetition)
        layer = nn.Linear(problem.x.shape[1] - 1, n_classes, dtype=torch.float32)
    start = torch.cat([layer.weight, layer.bias[:, None]], 1).detach().T.to(problem.x)
    return Draws(start, holds, answers[:, 0], answers[:, 1:])


def play(problem: Problem, setting: Setting, repetitions: range, seed: int) -> Played:
    """Run the repetitions whose numbers are in ``repetitions``, in batches of ``BLOCK``, and return their results."""
    blocks = (repetitions[i : i + BLOCK] for i in range(0, len(repetitions), BLOCK))
    with without_denormals():
        return joined(
            [play_block(problem, setting, [draw(problem, setting, r, seed) for r in some]) for some in blocks]
        )


def joined(parts: Sequence[Played]) -> Played:
    return Played(*(np.concatenate([getattr(part, f.name) for part in parts]) for f in fields(Played)))


def play_block(problem: Problem, setting: Setting, draws: Sequence[Draws]) -> Played:
    """Run one batch of B repetitions, each with one element of ``draws``, for R = ``setting.rounds`` rounds."""
    m, k, b, n = len(problem.y), problem.n_classes, len(draws), max(len(repetition.holds) for repetition in draws)
    like, measured, images = problem.x, problem.test_products.dtype, torch.arange(m)
    holds = _stacked([repetition.holds.T for repetition in draws], n).to(like).mT  # (repetitions B, clients N, M)
    answers = _stacked([repetition.answers for repetition in draws], n).to(like)  # (repetitions B, rounds R, clients N)
    sampled = _stacked([repetition.sampled for repetition in draws], n).to(measured)  # (B, R, STRAGGLER_DRAWS, N)
    weights, scale = holds / holds.sum(1, keepdim=True), 1 / ((1 - setting.q) * m)  # weights: v_ij, (B, N, M)
    # (B, N + K, M): weights of the M examples, first in the N clients' sums, then in the K classes' sums
    sums = torch.cat([weights, F.one_hot(problem.y, k).T.expand(b, k, m)], 1).to(measured)
    products = problem.products.to(measured)
    starts = torch.stack([repetition.start for repetition in draws], -1).flatten(1)  # weights, (pixels D, K B)
    logits, test_logits = problem.x @ starts, (problem.test_x @ starts).to(measured)
    moved = like.new_zeros(m, k * b)  # coefficients a of all repetitions: weights = start + x^T a
    lr, quantities = like.new_full((b,), setting.lr), []
    for r in range(setting.rounds):
        outputs = torch.addmm(test_logits, problem.test_products, moved.to(measured)).view(-1, k, b)
        # a prediction is right if its logit is largest; argmax would be twenty times slower
        right = outputs[torch.arange(len(outputs)), problem.test_y] == outputs.amax(1)
        p = torch.addmm(logits, problem.products, moved).view(m, k, b).softmax(1)
        p[images, problem.y] -= 1
        # repetitions run one after another, so that the (M, M) matrix stays in the cache
        pairs = zip(p.permute(2, 0, 1).to(measured), sums, strict=True)
        of_sums = torch.stack([_products(products, errors, weighted) for errors, weighted in pairs])
        of_clients, of_classes = of_sums[:, :n, :n], of_sums[:, n:, n:].double()
        norms = ((sampled[:, r] @ of_clients) * sampled[:, r]).sum(-1)  # (repetitions B, draws of stragglers)
        same = of_classes.diagonal(dim1=1, dim2=2).sum(1)
        quantities.append([
            right.double().mean(0), scale**2 * norms.double().mean(1),
            same, of_classes.sum((1, 2)) - same,
        ])  # fmt: skip
        step = lr * scale * (answers[:, r, None] @ weights)[:, 0].T  # (M, B): step along the gradient of each example
        moved -= (step[:, None] * p).flatten(1)
        lr = torch.where(answers[:, r].any(1), lr * setting.decay, lr)
    return Played(*(torch.stack(column, 1).numpy() for column in zip(*quantities, strict=True)))


def _products(products: Tensor, p: Tensor, sums: Tensor) -> Tensor:
    """Return the scalar products, (S, S), of S weighted sums of the examples' gradients x_j^T p_j.

    products: (M, M), <x_j, x_l> of all images; p: (M, K), errors of the softmax; sums: (S, M), weights of the examples.
    """
    p = p.contiguous()
    return sums @ (p @ p.T).mul_(products) @ sums.T


def _stacked(parts: Sequence[np.ndarray], n: int) -> Tensor:
    """Stack B arrays (..., number of clients) to (B, ..., n). Added clients hold no examples and never answer."""
    widths = [[(0, 0)] * (part.ndim - 1) + [(0, n - part.shape[-1])] for part in parts]
    return torch.from_numpy(np.stack([np.pad(part, width) for part, width in zip(parts, widths, strict=True)]))
