"""No sharing: every client trains on its real data D_i."""

from collections.abc import Sequence
from dataclasses import dataclass

from fedcommons.data.federated import Dealt
from fedcommons.generators.requests import Contribution
from fedcommons.privacy.release import Release
from fedcommons.sharing.stage import Assigned, Contributions


@dataclass(frozen=True)
class Real:
    """A strategy without sharing: no client contributes, and no data leave a client."""

    def make(self, dealt: Dealt, drawn: Sequence[Contribution]) -> Contributions:
        """See ``Stage``."""
        return Contributions.none(dealt)

    def release(self, dealt: Dealt, contributed: Contributions) -> tuple[Contributions, Sequence[Release]]:
        """See ``Stage``."""
        return contributed, ()

    def assign(self, dealt: Dealt, released: Contributions) -> Assigned:
        """See ``Stage``."""
        return Assigned(dealt.own.rows)
