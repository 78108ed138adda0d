"""Functions of the sharing strategies whose server fits images to the total of the clients' noisy sums."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

from fedcommons.core.communication import images_nbytes
from fedcommons.data.examples import Examples
from fedcommons.data.federated import ClientDatasets
from fedcommons.errors import UserError
from fedcommons.generators.requests import Contribution
from fedcommons.privacy.release import SIGMAS, Release
from fedcommons.sharing.stage import Assigned, Contributions
from fedcommons.storage.artifact_store import key_of
from fedcommons.storage.atomic_files import sha256


class Noisy(Protocol):
    """A sharing strategy that adds noise; exactly one of ``target_epsilon`` and ``noise_multiplier`` is set."""

    @property
    def target_epsilon(self) -> float | None: ...
    @property
    def noise_multiplier(self) -> float | None: ...
    @property
    def delta(self) -> float: ...


def check(self: Noisy, fields: Mapping[str, Any]) -> None:
    """Check that a strategy's privacy constants are consistent; ``fields``: the experiment's fields (see ``Stage``).

    Raises:
        UserError: not exactly one of target epsilon and noise multiplier is set, or a constant has no valid value.
    """
    if (self.target_epsilon is None) == (self.noise_multiplier is None):
        which = "neither" if self.target_epsilon is None else "both"
        raise UserError(f"set either sharing.target_epsilon or sharing.noise_multiplier, not {which}.")
    if 0 < (sigma := self.noise_multiplier or 0) < SIGMAS[0]:
        raise UserError(f"sharing.noise_multiplier must be 0 or at least {SIGMAS[0]:g}, got {sigma:g}.")
    if fields.get("dp.delta", self.delta) != self.delta:
        raise UserError(f"sharing.delta must be dp.delta = {fields['dp.delta']:g}, got {self.delta:g}.")


def key_of_client(client_data: ClientDatasets, client: int, facts: Mapping[str, Any]) -> str:
    """Return a hash of the client's examples and of other facts that decide its messages. The hash seeds the noise."""
    examples = client_data.clients.store[client_data.clients.rows[client]]
    content = sha256(examples.x.numpy().tobytes() + examples.y.numpy().tobytes())
    return key_of({"seed": client_data.seed, "client": client, "own": content, **facts})


def with_clients(events: Sequence[Release], client_data: ClientDatasets) -> list[Release]:
    """Return ``events``, one per client, with the client's number; without noise, all its examples are disclosed."""
    sizes = enumerate(client_data.clients.sizes)
    pairs = zip(events, sizes, strict=True)
    return [replace(event, client=i, n_disclosed=0 if event.covered else n) for event, (i, n) in pairs]


def contribute(client_data: ClientDatasets, images: Examples) -> Contributions:
    """Split the fitted images arbitrarily into contributions of the clients."""
    images, n = Examples(images.x.to(client_data.clients.store.x.dtype), images.y), len(client_data.clients)
    return Contributions.from_generated(client_data, [Contribution(images[slice(i, None, n)]) for i in range(n)])


def assign_to_all(
    client_data: ClientDatasets, released: Contributions, up: int, views: Mapping[str, float] | None = None
) -> Assigned:
    """Assign all fitted images to all clients; up: bytes that a client sends. views: see ``Assigned``."""
    n = len(client_data.clients)
    down = images_nbytes(len(released.rows), client_data.shape, client_data.itemsize, client_data.label_nbytes)
    return Assigned(
        client_data.clients.rows, [released.rows] * n, n_own=client_data.clients.sizes,
        pool=released.rows_by_client(n), nbytes=n * (up + down), views=views or {},
    )  # fmt: skip
