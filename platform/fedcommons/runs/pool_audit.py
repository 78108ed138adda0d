"""The audit of the clients' synthetic images for near-copies of real images, before the images are released."""

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
from fedcommons.data.federated import ClientDatasets
from fedcommons.generators.requests import GenerationRequest
from fedcommons.sharing.exchange import Shared
from fedcommons.sharing.stage import Contributions
from fedcommons.storage.atomic_files import write_json

WHY = "near-copies were withheld by a look at the data that it was made from"


def subjects(
    client_data: ClientDatasets,
    needs: Sequence[GenerationRequest],
    others: Examples,
    contributed: Sequence[Examples] | None = None,
) -> list[Subject]:
    """Return the input of the audit per client: synthetic images, training images of its generator, held-out images.

    The held-out images are the client's images that its generator did not train on, and ``others``.

    needs: the generation requests. others: validation examples. contributed: each client's synthetic images; None if
    they do not exist yet.

    Raises:
        UserError: a client has no held-out images of its classes.
    """
    result = []
    for i, need in enumerate(needs):
        client_examples = client_data.clients.store[client_data.clients.rows[need.client]]
        seen = {x.numpy().tobytes() for x in need.examples.x}
        held_out = client_examples[np.array([x.numpy().tobytes() not in seen for x in client_examples.x], bool)]
        unseen = Examples(torch.cat([held_out.x, others.x]), torch.cat([held_out.y, others.y]))
        images = need.examples[:0] if contributed is None else contributed[i]
        result.append(subject(need.client, images, need.examples, unseen, client_data.seed))
    return result


def spaces(module: LightningModule) -> dict[str, Space]:
    """Return the spaces in which images are compared: pixels, and the module's features if it has a ``head``."""
    return {"pixels": pixel_space, **({"features": feature_space(module)} if hasattr(module, "head") else {})}


@dataclass(frozen=True, eq=False)
class PoolAudit:
    """The result of an audit.

    released: the clients' contributions without the withheld images. record: the findings for each space (pixels,
    features) as plain values. withheld: client -> number of its withheld images.
    """

    released: Contributions
    record: Mapping[str, Any]
    withheld: Mapping[int, int]

    @property
    def facts(self) -> dict[str, Any]:
        """Return the findings for all clients together, for the run's summary."""
        of_all = {name: of_space["all"] for name, of_space in self.record.items()}
        return {**of_all, "withheld": sum(self.withheld.values())}

    @property
    def text(self) -> str:
        """Return the result of the audit as text for the user."""
        records = {name: of_space["all"] for name, of_space in self.record.items() if of_space["all"]}
        if not records:
            return "audit: no client contributes an image."
        p = next(iter(records.values()))
        verdict = [name for name, of_space in records.items() if of_space["memorised"]]
        others = [power(name, of_space) for name, of_space in records.items() if name not in verdict]
        reason = f"; in {' and '.join(verdict)} more synthetic images resemble seen images than chance explains"
        figures = (
            f"audit: {100 * p['closer']:.1f} % of {p['images']:,} synthetic images are closer to an image that their "
            "generator saw than to a held-out image (50 % if nothing was memorised; 95 % interval "
            f"{100 * p['low']:.0f} to {100 * p['high']:.0f} %), {p['near_copies']} are near-copies "
            f"({p['expected']:.1f} of fresh images would be), {sum(self.withheld.values())} withheld"
        )
        return " ".join([f"{figures}{reason if verdict else ''}.", *others])

    def write(self, folder: Path) -> None:
        """Write the findings to ``audit.json`` in ``folder``."""
        withheld = {str(client): n for client, n in self.withheld.items()}
        write_json(folder / "audit.json", {"spaces": dict(self.record), "withheld": withheld})


def power(space: str, findings: Mapping[str, Any]) -> str:
    """Return a sentence on the smallest number of copies that the audit would have detected in a space.

    findings: the audit's record of this space (``copies.Audit.record``). Its entry ``finds`` is this number of copies
    as a share of the images; None: no number would have been detected.
    """
    if findings["finds"] is None:
        return f"In {space} the audit would not have detected copies in any number: images are too few, or too similar."
    return (
        f"In {space} the audit would have detected {findings['finds_images']:,} copies among these images "
        f"({100 * findings['finds']:.2g} %; exact, moved by a pixel or mirrored) with probability 0.9."
    )


def audited(
    client_data: ClientDatasets, contributed: Contributions, needs: Sequence[GenerationRequest], others: Examples,
    module: LightningModule, *, withhold: bool,
) -> PoolAudit:  # fmt: skip
    """Compare the synthetic images with the generators' training images; with ``withhold``, remove near-copies.

    needs: the generation requests. others: validation examples. module: the run's untrained module, whose features do
    not depend on any client's data.
    """
    synthetic = contributed.rows >= len(client_data.clients.store)
    positions = {need.client: np.flatnonzero((contributed.owners == need.client) & synthetic) for need in needs}
    contributions = [contributed.store[contributed.rows[at]] for at in positions.values()]
    compared = audit(subjects(client_data, needs, others, contributions), spaces(module), client_data.seed)
    is_released, withheld = np.full(len(contributed.rows), True), dict.fromkeys(positions, 0)
    if withhold:
        for client, near in compared.near().items():
            is_released[positions[client][near]] = False
            withheld[client] = int(near.sum())
    rest = replace(contributed, rows=contributed.rows[is_released], owners=contributed.owners[is_released])
    return PoolAudit(rest, compared.record(), withheld)


def uncovered(shared: Shared) -> Shared:
    """Mark all ledger entries as having no privacy guarantee, as real images decide which images are withheld."""
    return replace(shared, releases=[replace(r, mechanism=None, reason=WHY) for r in shared.releases])
