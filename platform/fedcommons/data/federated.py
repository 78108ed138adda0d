"""The clients' partitioned data and the public facts, which are the input of a sharing strategy."""

from dataclasses import dataclass, field
from hashlib import blake2b

from fedcommons.data.clients import Clients
from fedcommons.deprecated import accepts_old_names


@accepts_old_names(own="clients")
@dataclass(frozen=True)
class ClientDatasets:
    """The clients' real data after the partition, and public facts.

    own: the clients' rows of all training images. n_classes: None if the labels are not classes. flip: mirrored images
    are as likely. seed: the run's seed. is_secret: the noise is secret and cannot be drawn again. salt: the salt of an
    audit, which replaces the secret salts. before: hash of examples and rows, with the hash of the examples as it was
    first computed.
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
        """Hash the present examples and rows, as ``before`` hashes their first state."""
        return self._with_rows(self.clients.store[slice(None)].digest)

    def _with_rows(self, examples: str) -> str:
        rows = self.clients.rows
        parts = (part.astype("<i8").tobytes() for part in (rows.flat.numpy(), rows.starts, rows.sizes))
        return f"{examples} {blake2b(b''.join(parts), digest_size=12).hexdigest()}"

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape of an example."""
        return tuple(self.clients.store.x.shape[1:])

    @property
    def itemsize(self) -> int:
        """Return the bytes per number of an example: 1 for uint8 images."""
        return self.clients.store.x.element_size()

    @property
    def label_nbytes(self) -> int:
        """Return the bytes of a sent label: one for up to 256 classes; for regression, the bytes of its floats."""
        y = self.clients.store.y
        if y.is_floating_point():
            return y[:1].nbytes // len(y[:1])
        return 0 if self.n_classes is None else max(1, -(-(self.n_classes - 1).bit_length() // 8))

    @property
    def n_total(self) -> int:
        """Return the number of real examples of all clients."""
        return len(self.clients.store)
