"""The input of a sharing strategy: the clients' partitioned data and public facts, such as the number of classes."""

from dataclasses import dataclass, field
from hashlib import blake2b

from fedcommons.data.clients import Clients
from fedcommons.deprecated import accepts_old_names


@accepts_old_names(own="clients")
@dataclass(frozen=True)
class ClientDatasets:
    """The clients' real data after the partition, and public facts.

    clients: the clients' data, as rows of the store of all training examples.
    n_classes: number of classes; None if the labels are not classes.
    flip: whether a mirrored image is as probable as the image.
    seed: the run's seed.
    is_secret: whether noise comes from secret salts (random bytes), so that an attacker cannot draw it again.
    salt: further bytes in the seeds of noise that is not secret; audits set these bytes.
    before: hash of the examples and of the clients' rows at the time of the construction.
    """

    clients: Clients
    n_classes: int | None
    flip: bool
    seed: int
    is_secret: bool = False
    salt: bytes = b""
    before: str = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "before", self._with_rows(self.clients.store.digest))

    @property
    def now(self) -> str:
        """Return the hash of the present examples and rows. It equals ``before`` until user code changes the data."""
        return self._with_rows(self.clients.store[slice(None)].digest)

    def _with_rows(self, examples: str) -> str:
        rows = self.clients.rows
        parts = (part.astype("<i8").tobytes() for part in (rows.flat.numpy(), rows.starts, rows.sizes))
        return f"{examples} {blake2b(b''.join(parts), digest_size=12).hexdigest()}"

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape of one example, (C, H, W) for images."""
        return tuple(self.clients.store.x.shape[1:])

    @property
    def itemsize(self) -> int:
        """Return the number of bytes of one value of an example, such as 1 for a pixel of a uint8 image."""
        return self.clients.store.x.element_size()

    @property
    def label_nbytes(self) -> int:
        """Return the number of bytes of one label in a message; 0 without labels.

        A class has 1 byte if there are at most 256 classes. A regression label has the bytes of all its floats.
        """
        y = self.clients.store.y
        if y.is_floating_point():
            return y[:1].nbytes // len(y[:1])
        return 0 if self.n_classes is None else max(1, -(-(self.n_classes - 1).bit_length() // 8))

    @property
    def n_total(self) -> int:
        """Return the number of real training examples in the store of all clients."""
        return len(self.clients.store)
