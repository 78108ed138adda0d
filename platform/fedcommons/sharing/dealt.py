"""What a sharing stage starts from."""

from dataclasses import dataclass

from fedcommons.data.clients import Clients


@dataclass(frozen=True)
class Dealt:
    """The clients' real data as the partition dealt them, and public facts.

    own: the clients' rows of all training images. flip: mirrored images are as likely. seed: the run's.
    """

    own: Clients
    n_classes: int
    flip: bool
    seed: int

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of an example."""
        return tuple(self.own.store.x.shape[1:])

    @property
    def itemsize(self) -> int:
        """Bytes of a number of an example: 1 for uint8 images."""
        return self.own.store.x.element_size()

    @property
    def n_total(self) -> int:
        """Number of real examples of all clients."""
        return len(self.own.store)
