"""What a sharing stage starts from."""

from dataclasses import dataclass

from fedcommons.data.clients import Clients


@dataclass(frozen=True)
class Dealt:
    """The clients' real data as the partition dealt them, and what is known of them.

    own: rows of the data set's training images, all of them; flip: a mirrored image is as likely; seed: the run's.
    """

    own: Clients
    n_classes: int
    flip: bool
    seed: int

    @property
    def shape(self) -> tuple[int, ...]:
        """Of an example."""
        return tuple(self.own.store.x.shape[1:])

    @property
    def n_total(self) -> int:
        """Real examples of all clients."""
        return len(self.own.store)
