"""Components that exist only in this process, such as a class of a notebook, by their names ``__main__:NAME``.

Processes of Ray get the components from the driver by ``packed``.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from fedcommons.errors import UserError, quote

PREFIX = "__main__:"
UNHASHED = "unhashed-"
"""Beginning of the value that identifies code without hash; a random number follows."""


@dataclass(frozen=True)
class LiveObject:
    """A component. code: the hash of a data set's examples, or ``UNHASHED`` and a random number."""

    component: Callable[..., Any]
    code: str


objects: dict[str, LiveObject] = {}
"""Name -> component. A later component of the same name replaces an earlier one."""


def is_live(name: str) -> bool:
    """Return whether a component's name begins with ``PREFIX``."""
    return name.startswith(PREFIX)


def get(what: str, name: str) -> LiveObject:
    """Return the component ``name``; what: the field that names the component, for the message.

    Raises:
        UserError: this process has no such object.
    """
    if name not in objects:
        raise UserError(
            f"{what} {quote(name)} is an object of the Python process that made the experiment: define it in this "
            "process too and pass the object to experiment(...)."
        )
    return objects[name]


def packed(names: Iterable[str]) -> dict[str, LiveObject]:
    """Return the components among ``names`` that exist only in this process."""
    return {name: objects[name] for name in names if name in objects}


def unhashed(digests: Mapping[str, str], names: Mapping[str, str]) -> list[str]:
    """Return a message for each component whose code has no hash.

    digests: kind -> hash of a component's code, or ``UNHASHED`` and a random number. names: kind -> component.
    """
    return [
        f"{kind} {names[kind]} is not from a module, so a run with it cannot be resumed: to resume runs, import it "
        "from a file."
        for kind, digest in digests.items()
        if digest.startswith(UNHASHED)
    ]
