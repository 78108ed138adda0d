"""The sensitivity test of private generators, and of the data that clients share before round 1 (``Shares``)."""

import inspect

import numpy as np

from fedcommons.core.algorithm import Shares
from fedcommons.core.worker import fresh_torch
from fedcommons.data.clients import Clients
from fedcommons.data.examples import Examples
from fedcommons.generators.generator import Generator, Receipt
from fedcommons.privacy.noise import SEED_ALONE, Noise
from fedcommons.privacy.release import Release
from fedcommons.seeding import keyed_globals
from fedcommons.testing.comparing import require
from fedcommons.testing.federations import digits
from fedcommons.testing.judging import Output, faults_of_seeds, faults_of_streams, first_and_count, renamed
from fedcommons.testing.neighbours import BLANKED, RELABELLED, Kind, apart
from fedcommons.testing.sides import Side, playing

SIZES = (12, 9)
"""Number of examples of each client, in the test of a method that shares data."""

N_CLASSES = 10


@fresh_torch()
def check_generator(generator: Generator, examples: Examples | None = None, *, seed: int = 0) -> None:
    """Train ``generator`` on neighbouring data sets with the same noise, and compare the weights of both trainings.

    The weights may differ by as much as the declared privacy of the generator (its receipt) allows. If the receipt
    declares no protection, the weights are not checked. examples: training examples; None: 24 handwritten digits.

    Raises:
        AssertionError: the message names the weights that moved too far, the distance, and the declared privacy.
    """
    store = examples or digits((24,)).data.clients.store
    floating = Examples(store.x.float(), store.y)  # as floats, because a blanked example is nan
    for kind, those in ((BLANKED, floating), (RELABELLED, store)):
        try:
            sentences = _faults(generator, those, kind, seed)
        except (TypeError, ValueError, RuntimeError):
            if kind is RELABELLED or store.x.is_floating_point():
                raise
            continue  # the generator refuses floating-point images, so no example can be blanked
        require(not sentences, f"{type(generator).__name__}: {first_and_count(sentences)}")


def _faults(generator: Generator, examples: Examples, kind: Kind, seed: int) -> list[str]:
    clients = Clients(examples, [np.arange(len(examples))])
    both, first = [each.store for each in apart(clients, [0], kind, seed)], Side(seed)
    sides = first, first.follower(kind.times)
    sent, other = (_fitted(generator, each, seed, side) for each, side in zip(both, sides, strict=True))
    return faults_of_streams(sent, other, sides, kind, lambda side: _fitted(generator, both[0], seed, side))


def _fitted(generator: Generator, examples: Examples, seed: int, side: Side) -> Output:
    """Train with the noise of ``side`` (one of two runs); return the weights and the declared privacy (receipt)."""
    fit, epochs = generator.fit, generator.epochs
    noise = {"noise": Noise(SEED_ALONE)} if "noise" in inspect.signature(fit).parameters else {}
    with keyed_globals(seed, "generator"), playing(side):
        trained = fit(examples, N_CLASSES, seed, [epochs], flip=False, **noise)[epochs]
    weights = {name: t.detach().clone() for name, t in trained.weights.items()}
    return Output(weights, [(trained.receipt or Receipt()).release(0, *weights)])


def shared_faults(algorithm: Shares, kind: Kind, seed: int) -> list[str]:
    """Let client 0 share data before round 1 twice, with one example changed, and return the faults as sentences.

    A fault is a shared value that differs between the two neighbouring data sets more than its declared privacy allows.
    """
    clients = digits(SIZES).data.clients
    both = apart(Clients(Examples(clients.store.x / 255, clients.store.y), clients.rows), [0], kind, seed)

    def play(number: int, side: Side) -> Output:
        with keyed_globals(side.seed, "share"), playing(side):
            common = algorithm.share(both[number], N_CLASSES, side.seed)
        tensors = {"shared examples": common.examples.x, "shared labels": common.examples.y}
        releases = [event for event in common.releases if event.client == 0] or [Release(0)]
        return Output(tensors, renamed(releases, tensors))

    return [f"before round 1: {sentence}" for sentence in faults_of_seeds(play, kind, seed)[1]]
