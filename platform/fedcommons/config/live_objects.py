"""Components that exist only in this process, such as a class of a notebook, by their names ``__main__:NAME``.

Processes of Ray get the components from the driver by ``packed``. The hash of a component's code is a function of the
driver, as the class and the variables that it uses may change; in other processes it is the driver's value.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from fedcommons.errors import UserError, quote

PREFIX = "__main__:"
UNNAMED = "unnamed-"
"""Beginning of the hash of code without source. A random number follows, as different code must have another hash."""


@dataclass(frozen=True)
class LiveObject:
    """A component, and the function that returns the hash of its code as it is now."""

    component: Callable[..., Any]
    digest: Callable[[], str]


objects: dict[str, LiveObject] = {}
"""Name -> component. A later component of the same name replaces an earlier one."""


def is_live(name: str) -> bool:
    """Return whether a component's name is that of an object of a process."""
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
    """Return those of the components ``names`` that exist only in this process, with their present hashes."""
    live = {name: objects[name] for name in names if name in objects}
    return {name: replace(its, digest=partial(str, its.digest())) for name, its in live.items()}


def unnamed(digests: Mapping[str, str], names: Mapping[str, str]) -> list[str]:
    """Return a message for each component whose code has no source.

    digests: kind -> hash of a component's code. names: kind -> component.
    """
    return [
        f"{kind} {names[kind]} has no source (it comes from exec or Python's prompt), so the run has no name and "
        "cannot be resumed: write the code into a file or a notebook cell."
        for kind, digest in digests.items()
        if digest.startswith(UNNAMED)
    ]
