"""Audit of sharing strategies that fit images to clients' noisy sums (merf, ndpdc), by an auditor who sees the sums.

The images are computed from the sums, so an attacker with only the images knows no more than the auditor. The result is
an estimate of epsilon, not a bound (see ``audits.white_box_estimate``).

merf: the worst pair of neighbouring data sets, one image and no image. Many messages are drawn for both data sets.
With summed noise, the auditor sees only the sum of all clients' messages.
ndpdc: worst-case examples (canaries), whose features are orthogonal and have norm 1 in all steps. The client has a
random half of the canaries.
"""

from collections.abc import Callable
from dataclasses import replace
from itertools import count
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from fedcommons.audits.white_box_estimate import Estimate, estimate, of_release
from fedcommons.cli import parse
from fedcommons.data.clients import Clients
from fedcommons.data.examples import Examples
from fedcommons.data.federated import ClientDatasets
from fedcommons.errors import UserError
from fedcommons.privacy.noise import of_audit
from fedcommons.privacy.release import Release
from fedcommons.reports import tables
from fedcommons.runs.build import build
from fedcommons.runs.spec import RunSpec
from fedcommons.seeding import numpy_generator, seed_for
from fedcommons.sharing.merf import MERF
from fedcommons.sharing.ndpdc import NDPDC
from fedcommons.sharing.random_features import sums
from fedcommons.sharing.stage import Contributions
from fedcommons.storage.atomic_files import write_text
from fedcommons.tune import grid

DRAWS, DIRECTIONS = 25, 4
"""merf draws ``DRAWS`` x ``--canaries`` messages per data set. ndpdc uses ``DIRECTIONS`` x ``--canaries`` canaries."""


def of_merf(stage: MERF, client_data: ClientDatasets, stated: Release, canaries: int, delta: float) -> Estimate:
    """Return the estimate of epsilon from messages that clients compute from one image and from no image."""
    phi, classes = stage.phi(client_data), client_data.n_classes or 0
    seeds = count(seed_for(client_data.seed, "audit of sums"))
    image, senders = client_data.clients.store[np.arange(1)], len(client_data.clients) if stage.noise == "summed" else 1
    added = sums(phi, image, classes).flatten()

    def draw(present: bool) -> np.ndarray:
        rows = [np.arange(int(present and i == 0)) for i in range(senders)]
        seed = next(seeds)
        world = ClientDatasets(Clients(image, rows), classes, client_data.flip, seed, salt=of_audit(seed).salt)
        return torch.stack([stage.message(world, i, phi).values for i in range(senders)]).sum(0).flatten().numpy()

    return of_release(draw, (added / added.norm()).numpy(), stated, delta, DRAWS * canaries)


def of_ndpdc(stage: NDPDC, client_data: ClientDatasets, stated: Release, canaries: int, delta: float) -> Estimate:
    """Return the estimate of epsilon from all messages of one client, whose examples are replaced by canaries."""
    seed, canaries = seed_for(client_data.seed, "audit of sums"), DIRECTIONS * canaries
    inside = numpy_generator(seed, "canaries").permutation(canaries) < canaries // 2
    numbers = torch.from_numpy(np.flatnonzero(inside)).float()
    has_canaries = Examples(numbers.view(-1, 1, 1, 1), torch.zeros(len(numbers), dtype=torch.long))
    of_world = replace(client_data, seed=seed, is_secret=False, salt=of_audit(seed).salt)
    sender = replace(stage.sender(of_world, stated.client), examples=has_canaries, n_classes=1)

    def phi(x: Tensor, _: Tensor) -> Tensor:
        which = ((x.flatten() + 1) * 127.5).round().long()  # canaries' numbers, restored from pixels in [-1, 1]
        return torch.nn.functional.one_hot(which, canaries).float()

    scores = torch.stack([sender.message(phi, step).values[0] for step in range(stage.iterations)])
    return estimate(scores.double().numpy(), inside, stated, delta)


def audited(prepared: RunSpec, attacked: int | None, canaries: int) -> tuple[Release, Estimate]:
    """Return the privacy release of a client's noisy sums and the estimate of its epsilon."""
    stage, client_data = prepared.stage, prepared.client_data
    client = int(np.argmax(client_data.clients.sizes)) if attacked is None else attacked
    if not 0 <= client < len(client_data.clients):
        raise UserError(f"--attacked must be one of 0 ... {len(client_data.clients) - 1}, got {client}.")
    stated = stage.release(client_data, Contributions.from_generated(client_data, []))[1][client]
    if not stated.covered:
        raise UserError("without noise no epsilon is reported, so there is none to audit: set sharing.target_epsilon.")
    arguments = client_data, stated, canaries, prepared.record.dp.delta
    if isinstance(stage, MERF):
        return stated, of_merf(stage, *arguments)
    assert isinstance(stage, NDPDC)
    return stated, of_ndpdc(stage, *arguments)


def work(options: parse.Options, say: Callable[[str], None]) -> None:
    """Audit the noisy sums of one experiment per seed, print one table of all results and write it to ``--out``."""
    path = Path(options.out) / "audit_pool.md"
    if path.exists():
        raise UserError(f"--out: {options.out} holds an audit already; name another folder.")
    head = ["seed", "client", "q", "noise multiplier", "steps", "distance mu with / without", "epsilon is about",
            "with mu as declared", "reported", "verdict"]  # fmt: skip
    lines, faults = [], []
    for config in options.configs:
        stated, result = audited(build(config), options.attacked, options.canaries)
        numbers = (stated.q, stated.sigma, stated.steps)
        lines.append(
            [str(config.seed), str(stated.client), *(f"{n:.3g}" for n in numbers),
             f"{result.mu:.3g} [{result.low:.3g}, {result.high:.3g}]", f"{result.epsilon:.3g}", f"{result.ceiling:.3g}",
             f"{result.reported:.3g}", result.verdict]
        )  # fmt: skip
        faults += [f"Seed {config.seed}: {fault}." for fault in result.faults]
    notes = [
        "Epsilon is estimated by an auditor who sees every noisy sum, from the distance mu between messages with and "
        "without an example, in standard deviations. The estimate assumes normal distributions, and it is not a bound. "
        "[ ]: 95 % interval of mu. Epsilon is that of the interval's lower end.",
        *faults,
    ]
    text = grid.stamped(tables.markdown(head, lines) + tables.numbered(notes), options)
    write_text(path, text)
    say("\n" + text)
