"""The audit of what clients contribute, before it is released (``sharing.audit``), and what it withholds."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pytorch_lightning import LightningModule

from fedcommons.audits.copies import audit
from fedcommons.audits.distances import Space, feature_space, pixel_space
from fedcommons.audits.nearest_neighbours import Subject, subject
from fedcommons.data.examples import Examples
from fedcommons.data.federated import Dealt
from fedcommons.generators.requests import Need
from fedcommons.sharing.stage import Contributions, Shared
from fedcommons.storage.atomic_files import write_json

WHY = "near-copies were withheld by a look at the data that it was made from"


def subjects(
    dealt: Dealt, needs: Sequence[Need], others: Examples, contributed: Sequence[Examples] | None = None
) -> list[Subject]:
    """Each client beside held-out images: those of its own that its generator did not see, and ``others``.

    contributed: what each client contributes; nothing where that is not known yet.

    Raises:
        UserError: a client has no held-out images of its classes.
    """
    result = []
    for i, need in enumerate(needs):
        own = dealt.own.store[dealt.own.rows[need.client]]
        mine = own[_unseen(own, need.examples)]
        unseen = Examples(torch.cat([mine.x, others.x]), torch.cat([mine.y, others.y]))
        images = need.examples[:0] if contributed is None else contributed[i]
        result.append(subject(need.client, images, need.examples, unseen, dealt.seed))
    return result


def _unseen(own: Examples, seen: Examples) -> np.ndarray:
    """Which of these examples are not among those that were seen; compared by content, as any stage may choose them."""
    contents = {x.numpy().tobytes() for x in seen.x}
    return np.array([x.numpy().tobytes() not in contents for x in own.x], bool)


def spaces(module: LightningModule) -> dict[str, Space]:
    """Pixels, and the embedding of a classifier that has one."""
    return {"pixels": pixel_space, **({"features": feature_space(module)} if hasattr(module, "head") else {})}


@dataclass(frozen=True, eq=False)
class PoolAudit:
    """What clients contribute after the audit; ``record``: its findings as plain values; withheld: by client."""

    kept: Contributions
    record: Mapping[str, Any]
    withheld: Mapping[int, int]

    @property
    def facts(self) -> dict[str, Any]:
        """For the summary: the findings for all clients together."""
        return {
            **{name: of_space["all"] for name, of_space in self.record.items()},
            "withheld": sum(self.withheld.values()),
        }

    @property
    def told(self) -> str:
        """What the screen says."""
        found = {name: of_space["all"] for name, of_space in self.record.items() if of_space["all"]}
        if not found:
            return "audit: no client contributes an image."
        p = next(iter(found.values()))
        verdict = [name for name, of_space in found.items() if of_space["memorised"]]
        return (
            f"audit: {100 * p['closer']:.1f} % of {p['images']:,} made images are closer to an image that their "
            f"generator saw than to a held-out one (50 % if nothing was memorised; 95 % interval {100 * p['low']:.0f} "
            f"to {100 * p['high']:.0f} %), {p['near_copies']} are near-copies ({p['expected']:.1f} of fresh images "
            f"would be), {sum(self.withheld.values())} withheld"
            + (f"; by {' and '.join(verdict)} more than chance explains." if verdict else ".")
            + "".join(f" {power(name, of_space)}" for name, of_space in found.items() if not of_space["memorised"])
        )

    def write(self, folder: Path) -> None:
        """``audit.json``."""
        withheld = {str(client): n for client, n in self.withheld.items()}
        write_json(folder / "audit.json", {"spaces": dict(self.record), "withheld": withheld})


def power(space: str, found: Mapping[str, Any]) -> str:
    """A sentence on the copies that a verdict of no memory would have found; ``found``: see ``copies.facts``."""
    if found["finds"] is None:
        return f"The look at {space} would not have found copies, however many: images are too few, or too much alike."
    return (
        f"The look at {space} would have found {found['finds_images']:,} copies among them "
        f"({100 * found['finds']:.2g} %; exact, moved by a pixel or mirrored) with probability 0.9."
    )


def audited(
    dealt: Dealt, contributed: Contributions, needs: Sequence[Need], others: Examples, module: LightningModule,
    *, withhold: bool,
) -> PoolAudit:  # fmt: skip
    """Compare what generators made with what they saw; with ``withhold`` leave near-copies out.

    The module is the untrained one of the run, which has seen nothing.
    """
    mine = {need.client: np.flatnonzero((contributed.owners == need.client) & _made(dealt, contributed))
            for need in needs}  # fmt: skip
    contributions = [contributed.store[contributed.rows[at]] for at in mine.values()]
    compared = audit(subjects(dealt, needs, others, contributions), spaces(module), dealt.seed)
    kept, withheld = np.full(len(contributed.rows), True), dict.fromkeys(mine, 0)
    if withhold:
        for client, near in compared.near().items():
            kept[mine[client][near]] = False
            withheld[client] = int(near.sum())
    rest = replace(contributed, rows=contributed.rows[kept], owners=contributed.owners[kept])
    return PoolAudit(rest, compared.record(), withheld)


def _made(dealt: Dealt, contributed: Contributions) -> np.ndarray:
    return contributed.rows >= len(dealt.own.store)


def uncovered(shared: Shared) -> Shared:
    """Without protection: what is withheld depends on real images in a way that no receipt accounts for."""
    return replace(shared, releases=[replace(r, mechanism=None, why=WHY) for r in shared.releases])
