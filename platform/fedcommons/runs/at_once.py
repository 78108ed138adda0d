"""What ``torch.vmap`` computes at once: clients of a block (``client.batched``), examples of a private step."""

from fedcommons.core import batched, dp_vectorised
from fedcommons.core.local import Batch
from fedcommons.core.work import Work
from fedcommons.errors import UserError


def require_at_once(model: str, work: Work, batch: Batch, *, clients: bool, examples: bool) -> None:
    """Refuse a module that vmap does not take, tried on a batch of two; clients, examples: of which many are asked for.

    Raises:
        UserError: it is one.
    """
    if clients and (why := batched.flaw(work, batch)):
        raise UserError(f"client.batched must be false for model {model}: {why}.")
    if examples and (why := dp_vectorised.flaw(work.module, work.named, batch)):
        raise UserError(f"dp.at_once must be 1 for model {model}: {why}.")
