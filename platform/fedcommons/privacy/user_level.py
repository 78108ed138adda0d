"""The statement of user-level central DP (``dp.central``): the section ``user_level`` of a run's privacy statement.

The accountant of the Gaussian mechanism with noise multiplier z depends on ``federation.sampling``:

fixed    a round has a fixed number of clients. The participants count as known, so sampling does not lower epsilon:
         q = 1, and the steps are the largest number of rounds in which one client takes part.
poisson  each client takes part with probability q = C, and the participants are secret (Mironov et al. 2019)

All planned rounds count, also after an early stop, because the stop depends on the models.
"""

from collections.abc import Mapping
from typing import Any

from fedcommons.privacy.accountants import accountant_of, composed
from fedcommons.privacy.ledger import Ledger
from fedcommons.privacy.salts import IF_SECRET, SECRET, SEEDED
from fedcommons.privacy.statement import DRAWN_AGAIN, epsilon_in_words

NEIGHBOURS = (
    "one client is blanked in all rounds: its update is zero and it is not counted as clipped or unclipped; numbers of "
    "examples, clients, participants and stragglers stay"
)
"""The neighbouring federations of user-level DP."""

AGAINST = (
    "other clients and all who see only the server's models; the server is trusted, as it sees each clipped update"
)
"""The adversary of user-level DP."""

NOT_COVERED = (
    "the experimenter's record (run folder, screen, W&B): losses, metrics, participants, rejected replies, measures",
    "other runs on the same data, whose epsilons add up",
)
"""Data that the epsilon of user-level DP never covers; every statement lists them."""


def user_level(
    ledger: Ledger, leaks: Mapping[str, str], *, noise: float, clip: float, last_clip: float | None, q: float,
    steps: int, rounds: int, delta: float, secret: bool,
) -> dict[str, Any]:  # fmt: skip
    """Return the section ``user_level``. The epsilon is None if other clients get data besides the server's models.

    Args:
        ledger: the privacy ledger of the run, with all that clients shared besides updates.
        leaks: name -> reason, for data that affect all rounds (``runs.leaks``).
        noise: z, the noise multiplier.
        clip: the clipping norm; with adaptive clipping, its value in round 1.
        last_clip: with adaptive clipping, the clipping norm after the last round; else None.
        q: sampling rate of the accountant.
        steps: number of rounds that the accountant counts for a client.
        rounds: planned number of rounds.
        delta: delta of the (epsilon, delta) guarantee.
        secret: whether the noise is secret.
    """
    shared = [f"{name}, which clients shared" for name in (*ledger.commons.names, *ledger.commons.uncovered)]
    outlived = [f"{name}, which remained after a client, so other clients could read it" for name in ledger.outlived]
    bare = [*dict.fromkeys(shared), *outlived, *(f"{name}: {reason}" for name, reason in leaks.items())]
    epsilon = None if bare else composed(((q, noise, steps),), delta)
    if epsilon is None:
        words = f"none, because the server's noise does not protect {bare[0]}"
    else:
        as_run = "" if secret else f"none as run, because {DRAWN_AGAIN}; "
        words = f"{as_run}{epsilon_in_words(epsilon, delta, secret)}, for a client's whole data set, against {AGAINST}"
    return {
        "epsilon": epsilon if secret else None,
        **({} if secret else {f"epsilon{IF_SECRET}": epsilon}),
        "noise": SECRET if secret else SEEDED,
        "delta": delta,
        "noise_multiplier": noise,
        "clip": clip,
        **({} if last_clip is None else {"last_clip": last_clip}),
        "q": q,
        "steps": steps,
        "rounds": rounds,
        "accountant": accountant_of([q]),
        "neighbours": NEIGHBOURS,
        "against": AGAINST,
        "uncovered": [*NOT_COVERED, *bare],
        "in_words": f"User-level guarantee: {words}.",
    }
