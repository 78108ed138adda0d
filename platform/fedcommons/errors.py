"""What goes wrong by the user's or a client's doing, each said in one sentence."""

from collections.abc import Iterable
from difflib import get_close_matches


class UserError(Exception):
    """A request that cannot be met: field, value, what is allowed, the nearest valid name. Raised before any work."""


class ClientError(RuntimeError):
    """A client's computation failed; the message names client, round and algorithm."""


def unknown(what: str, name: str, known: Iterable[str]) -> UserError:
    """The error for a name that is not among ``known``, with the nearest valid one offered."""
    known = sorted(known)
    near = get_close_matches(name, known, n=1, cutoff=0.4)
    hint = f"; did you mean {near[0]!r}?" if near else "."
    listing = f" Known: {', '.join(known)}." if len(known) <= 16 else " See --help."
    return UserError(f"unknown {what} {name!r}{hint}{listing}")
