"""Capabilities: properties that algorithms, sharing strategies and straggler rules declare for the engine."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Self

from fedcommons.deprecated import old_capabilities
from fedcommons.errors import UserError, name_of, nearest


@dataclass(frozen=True, kw_only=True)
class Capabilities:
    """The capabilities of a component, which its class declares: ``capabilities = Capabilities(needs_classes=True)``.

    A component without the attribute ``capabilities`` has the default values.

    Raises:
        TypeError: a keyword is not the name of a capability.
    """

    adds_updates: bool = False
    """The algorithm's ``merge`` is linear in the sums over clients, so updates may be compressed (as with averages)."""
    averages: bool = False
    """``merge`` uses only means over clients, ``total[name]`` / sum of weights, and no ``Reply.each``."""
    computes_inputs: bool = False
    """The algorithm computes means of inputs or gradients with respect to inputs, so tokens are refused."""
    distils: bool = False
    """The algorithm's server distils logits, so it needs a model with logits. It also needs image data, as it creates
    images unless it has ``needs_pool`` or ``needs_public``."""
    grows: Mapping[str, int] = field(default_factory=dict)
    """Entries of the server's state that each round enlarges: name -> axis. ``--dry-run`` uses their mean size."""
    keeps_batch_norm: bool = False
    """BatchNorm layers stay with the clients, so the model needs them and ``federation.buffers`` must be keep."""
    knows_number: bool = False
    """``Work.number`` is the client's number in the algorithm's ``client``. Client numbers count as public."""
    leaves_partial: bool = False
    """The straggler rule can return a share of work above 0, so a straggler may send partial work."""
    needs: Mapping[str, str] = field(default_factory=dict)
    """Attributes that the clients' module must have for the algorithm: name -> meaning."""
    needs_classes: bool = False
    """The algorithm works per class, so data sets whose labels are not classes are refused."""
    needs_pool: bool = False
    """The algorithm's server trains on a pool of images, so the sharing strategy must have ``serves_pool``."""
    needs_public: bool = False
    """The algorithm's server uses examples of no client (``RunData.public``), so ``data.public`` must be above 0."""
    refuses_batch_norm: bool = False
    """The algorithm is not defined for a model with BatchNorm."""
    repeats: Mapping[str, str] = field(default_factory=dict)
    """Job's function -> constant that sets how often the job repeats its work. ``--dry-run`` times few repetitions."""
    sees_statistics: bool = False
    """The algorithm's ``merge`` gets BatchNorm's statistics of client i in ``replies[i].each[BUFFERS]``."""
    serves_pool: bool = False
    """The sharing strategy gives the server the pool of shared examples, on which the server may train."""
    takes_partial: bool = False
    """The algorithm accepts replies with a straggler's partial work; if False, the engine drops such replies."""
    trains_images: bool = False
    """The algorithm's server optimises images, so the model must accept images with floating-point pixels."""
    trains_locally: bool = True
    """Clients train by ``work.local``; if this and ``needs_pool`` are False, fields of local training are refused."""
    trains_twice: bool = False
    """The algorithm trains each client twice in a round, so ``dp.target_epsilon`` is refused."""
    waits_for: str | None = None
    """Entry of the server's state that ``merge`` adds in the first round with replies and ``participants`` reads;
    ``--dry-run``, which counts rounds without calling ``merge``, assumes that the entry is added then."""
    watches_head: bool = False
    """The algorithm uses embeddings at the module's ``head`` (``features.Head``). It refuses labels per position."""

    def __new__(cls, **values: Any) -> Self:
        for name in values:
            if name not in NAMES:
                raise TypeError(f"there is no capability {name!r}{nearest(name, NAMES)}")
        return super().__new__(cls)


NAMES = tuple(f.name for f in fields(Capabilities))
"""The names of all capabilities."""


def capabilities_of(component: Any) -> Capabilities:
    """Return the capabilities of a component, or the default values if the component declares no capabilities.

    Raises:
        UserError: the attribute ``capabilities`` has another type.
    """
    declared = component.capabilities if hasattr(component, "capabilities") else Capabilities()
    if isinstance(declared, property):  # ``component`` is a class, and only an instance has the value
        return Capabilities()
    if not isinstance(declared, Capabilities):
        raise UserError(f"{name_of(component)}.capabilities must be Capabilities(...), got {type(declared).__name__}.")
    old = old_capabilities(component, [name for name in NAMES if name not in ("grows", "repeats")])
    return replace(declared, **old) if old else declared
