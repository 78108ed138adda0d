"""The sensitivity test of generators, and of what methods share before round 1."""

import inspect

from fedcommons.core.algorithm import Shares
from fedcommons.core.noise import SEED_ALONE, Noise
from fedcommons.core.release import Release
from fedcommons.core.worker import fresh_torch
from fedcommons.data.clients import Clients
from fedcommons.data.examples import Examples
from fedcommons.generators.generator import Generator, Receipt
from fedcommons.seeds import keyed_globals
from fedcommons.testing.comparing import require
from fedcommons.testing.federations import digits
from fedcommons.testing.judging import SLACK, Left, faults, renamed, spread_of
from fedcommons.testing.neighbours import BLANKED, RELABELLED, Kind, apart, neighbouring
from fedcommons.testing.sides import Side, playing

SIZES = (12, 9)
"""Examples of the clients of a method that shares."""

N_CLASSES = 10


@fresh_torch()
def check_generator(generator: Generator, examples: Examples | None = None, *, seed: int = 0) -> None:
    """Train ``generator`` on neighbouring examples with the same noise: do the weights keep what their receipt says?

    examples: default: 24 handwritten digits. A generator whose receipt covers nothing has nothing to keep.

    Raises:
        AssertionError: a sentence says what moved, by how much, and what was declared.
    """
    given = examples or digits((24,)).data.clients.store
    floating = Examples(given.x.float(), given.y)  # nan is a floating number
    for kind, those in ((BLANKED, floating), (RELABELLED, given)):
        both = neighbouring(those, [0], [int(given.y[given.y != given.y[0]][0])], kind)
        first = Side(seed)
        second = Side(seed, follows=first, times=kind.times)
        try:
            left = [_fitted(generator, each, seed, side) for each, side in zip(both, (first, second), strict=True)]
        except (TypeError, ValueError, RuntimeError):
            if kind is BLANKED and not given.x.is_floating_point():
                continue  # it takes no floating images
            raise
        found = faults(left[0], left[1], (first, second), kind, dict)
        require(not found, f"{type(generator).__name__}: {'; '.join(found[:3])}")


def _fitted(generator: Generator, examples: Examples, seed: int, side: Side) -> Left:
    """Weights and receipt."""
    fit, epochs = generator.fit, generator.epochs
    noise = {"noise": Noise(SEED_ALONE)} if "noise" in inspect.signature(fit).parameters else {}
    with keyed_globals(seed, "generator"), playing(side):
        trained = fit(examples, N_CLASSES, seed, [epochs], flip=False, **noise)[epochs]
    weights = {name: t.detach().clone() for name, t in trained.weights.items()}
    return Left(weights, [(trained.receipt or Receipt()).release(0, *weights)])


def shared_faults(algorithm: Shares, kind: Kind, seed: int) -> list[str]:
    """Of what a method's clients share before round 1; one of them has a neighbour."""
    own, first = digits(SIZES).data.clients, Side(seed)
    second = Side(seed, follows=first, times=kind.times)
    both = apart(Clients(Examples(own.store.x / 255, own.store.y), own.rows), [0], kind, seed)

    def played(number: int, side: Side) -> Left:
        with keyed_globals(side.seed, "share"), playing(side):
            common = algorithm.share(both[number], N_CLASSES, side.seed)
        tensors = {"shared examples": common.examples.x, "shared labels": common.examples.y}
        mine = [event for event in common.releases if event.client == 0] or [Release(0)]
        return Left(tensors, renamed(mine, tensors))

    one, two = played(0, first), played(1, second)
    spread = spread_of(lambda other: played(0, Side(seed + other)), one)
    return [f"before round 1: {said}" for said in faults(one, two, (first, second), kind, spread, SLACK)]
