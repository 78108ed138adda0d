"""What a sharing stage starts from."""

from dataclasses import dataclass, field
from hashlib import blake2b

from fedcommons.data.clients import Clients


@dataclass(frozen=True)
class Dealt:
    """The clients' real data as the partition dealt them, and public facts.

    own: the clients' rows of all training images. n_classes: None where labels are no classes. flip: mirrored images
    are as likely. seed: the run's. is_secret: nobody can draw the noise again. salt: of an
    audit, in place of secret ones. before: digest of examples and rows, the
    examples as they were when a digest of them was first asked for.
    """

    own: Clients
    n_classes: int | None
    flip: bool
    seed: int
    is_secret: bool = False
    salt: bytes = b""
    before: str = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "before", self._with_rows(self.own.store.digest))

    @property
    def now(self) -> str:
        """As ``before``, of examples and rows as they are now."""
        return self._with_rows(self.own.store[slice(None)].digest)

    def _with_rows(self, examples: str) -> str:
        rows = self.own.rows
        parts = (part.astype("<i8").tobytes() for part in (rows.flat.numpy(), rows.starts, rows.sizes))
        return f"{examples} {blake2b(b''.join(parts), digest_size=12).hexdigest()}"

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of an example."""
        return tuple(self.own.store.x.shape[1:])

    @property
    def itemsize(self) -> int:
        """Bytes of a number of an example: 1 for uint8 images."""
        return self.own.store.x.element_size()

    @property
    def label_nbytes(self) -> int:
        """Bytes of a label where examples travel: one for up to 256 classes, and those of what is regressed on."""
        y = self.own.store.y
        if y.is_floating_point():
            return y[:1].nbytes // len(y[:1])
        return 0 if self.n_classes is None else max(1, -(-(self.n_classes - 1).bit_length() // 8))

    @property
    def n_total(self) -> int:
        """Number of real examples of all clients."""
        return len(self.own.store)
