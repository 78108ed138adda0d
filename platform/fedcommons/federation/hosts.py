"""Checks that all hosts of a cluster have the same code, round numbers equally, and can write the folders of results.

``runtime.cpu_kind`` compares the CPUs of the hosts; ``config.user_code`` compares the user's files.
"""

import os
import shutil
import socket
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any, TypeVar

from fedcommons.errors import FEW, UserError, sentence
from fedcommons.federation import source_files
from fedcommons.runtime import cpu_kind
from fedcommons.runtime.rounding_env import differing, variables

Login = Callable[[], tuple[str, bool]]
"""Function that returns a flaw of a host's login of the tracker, or "", and whether the login must be repaired."""

ANSWER_S = 60.0
"""Seconds within which a host must answer."""

LOOK_S = 5.0
"""Seconds for which a host waits for a marker file, because a network file system may show a new file late."""

ROOM = 100 * 2**20
"""Bytes that must be free in each host's temporary folder and in each folder of results."""

T = TypeVar("T")


def facts() -> dict[str, Mapping[str, str]]:
    """Return the values of this host that are compared between hosts.

    files: hashes of source files, and versions of packages. variables: environment variables that affect rounding.
    host: the name of this host, for error messages.
    """
    return {"files": source_files.hashes(), "variables": variables(), "host": {"name": socket.gethostname()}}


def require_same(theirs: Mapping[str, Mapping[str, str]]) -> None:
    """Check that this process has the same code, packages and rounding as the process that started the command.

    Args:
        theirs: the ``facts`` of the process that started the command (driver).

    Raises:
        UserError: this host has a different, missing or additional file or package, or rounds differently.
    """
    host, files, ours = socket.gethostname(), theirs["files"], source_files.hashes()
    if names := sorted(name for name in {*ours, *files} if ours.get(name) != files.get(name)):
        listed = ", ".join(_difference(name, ours, files) for name in names[:FEW])
        more = f" and {len(names) - FEW} more" if len(names) > FEW else ""
        than, advice = "when it", "start again, and edit files only in another checkout during a run"
        if host != theirs["host"]["name"]:
            than = "the host that"
            advice = "install the same on all hosts (`make cluster-sync`; on AWS `ray rsync-up -A`), and start again"
        raise UserError(f"host {host} has other code than {than} started this command ({listed}{more}): {advice}.")
    if what := differing(theirs["variables"], variables()):
        raise UserError(
            f"host {host} would round otherwise ({what}): start Ray with equal environment variables everywhere."
        )


def _difference(name: str, ours: Mapping[str, str], theirs: Mapping[str, str]) -> str:
    if name in source_files.PACKAGES:
        return f"{name} {ours[name]} and not {theirs[name]}"
    return f"{name} is missing" if name not in ours else f"{name} is not there" if name not in theirs else name


def run_if_same(theirs: Mapping[str, Mapping[str, str]], function: Callable[..., T], *arguments: Any) -> T:
    """Check that CPU, code and packages of this process are the driver's, then call ``function(*arguments)``."""
    cpu_kind.require_this_kind()
    require_same(theirs)
    return function(*arguments)


def require_alike(
    pin: Mapping[str, str], shared: Sequence[tuple[str, Path]], advice: str, login: Login | None = None
) -> list[str]:
    """Check that each host of Ray with the labels ``pin`` has the driver's source files and can write its folders.

    The driver is this process, which started the command and must be connected to Ray.

    Args:
        pin: labels of the Ray nodes that will train; see ``cpu_kind.choose_kind``.
        shared: pairs (option that names the folder, folder) of the folders that all hosts must share.
        advice: another method to share results, added to the error message.
        login: checks a host's login of the tracker; None: no login is needed.

    Returns:
        A message for each host on which the tracker's server does not answer.

    Raises:
        UserError: a host has different source files, does not share a folder, cannot write a folder or has no room in
            it, has no valid login, or does not answer.
    """
    import ray
    from ray.exceptions import GetTimeoutError, RayError
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    driver_node = ray.get_runtime_context().get_node_id()
    others = [node for node in cpu_kind.select_nodes(ray.nodes(), pin) if node["NodeID"] != driver_node]
    messages = list[str]()
    if not others:
        return messages
    require_room([(option, str(folder)) for option, folder in shared])
    with ExitStack() as markers:  # one empty file per folder, which exists until all hosts have answered
        wanted = list[tuple[str, str]]()
        for option, folder in shared:
            with NamedTemporaryFile(prefix=".shared-", dir=folder.resolve(), delete=False) as marker:
                markers.callback(_remove, Path(marker.name))
            wanted.append((option, marker.name))
        theirs = facts()
        task: Any = ray.remote(num_cpus=0, max_retries=0)(run_if_same)
        places = [NodeAffinitySchedulingStrategy(node["NodeID"], soft=False) for node in others]
        arguments = (theirs, require_ready, wanted, advice, login)
        answers = [task.options(scheduling_strategy=place).remote(*arguments) for place in places]
        deadline = time.monotonic() + ANSWER_S
        for node, answer in zip(others, answers, strict=True):
            host = node["NodeManagerHostname"]
            try:
                messages += ray.get(answer, timeout=max(0.0, deadline - time.monotonic()))
            except GetTimeoutError:
                raise UserError(
                    f"host {host} of Ray does not answer within {ANSWER_S:g} s; stop Ray there (`ray stop`)."
                ) from None
            except RayError as error:
                if isinstance(cause := getattr(error, "cause", None), UserError):
                    raise UserError(sentence(cause)) from None
                reason = (str(error).strip().splitlines() or [type(error).__name__])[-1]
                raise UserError(f"host {host} of Ray cannot run this version of fedcommons ({reason}).") from None
    return messages


def _remove(marker: Path) -> None:
    with suppress(OSError):  # the check is over, and a network file system may have lost the file
        marker.unlink(missing_ok=True)


def require_ready(markers: Sequence[tuple[str, str]], advice: str, login: Login | None) -> list[str]:
    """Check that this host shares the folders of the marker files, can write them, and has a valid tracker login.

    Return a message if the tracker's server does not answer.

    Raises:
        UserError: see ``require_markers`` and ``require_room``; or the tracker does not accept this host's login.
    """
    require_markers(markers, advice)
    require_room([(option, os.path.dirname(marker)) for option, marker in markers])
    flaw, must_repair = login() if login else ("", False)
    what = f"--wandb online: host {socket.gethostname()}: {flaw}"
    if must_repair:
        raise UserError(
            f"{what}; repair the login there (WANDB_API_KEY must be set before Ray starts), or use --wandb offline."
        )
    return [f"{what}, so runs there stay offline."] if flaw else []


def require_room(folders: Sequence[tuple[str, str]]) -> None:
    """Check that this host can write the folders and its temporary folder, and that they have ``ROOM`` free bytes.

    Args:
        folders: pairs (option that names the folder, folder).

    Raises:
        UserError: a folder cannot be written, or its disk is full.
    """
    host = socket.gethostname()
    for option, folder in (*folders, ("TMPDIR", tempfile.gettempdir())):
        try:
            with tempfile.TemporaryFile(dir=folder):
                room = shutil.disk_usage(folder).free
        except OSError as error:
            raise UserError(f"{option}: host {host} cannot write {folder} ({error.strerror}).") from None
        if room < ROOM:
            raise UserError(
                f"{option}: the disk of host {host} is full: {folder} has {room / 2**20:.0f} MB free; free "
                f"{ROOM / 2**20:.0f} MB or more there."
            )


def require_markers(markers: Sequence[tuple[str, str]], advice: str) -> None:
    """Check that this host sees the marker files, which shows that the host shares the files' folders.

    Args:
        markers: pairs (option that names the folder, path of the marker file).
        advice: addition to the error message.

    Raises:
        UserError: this host does not see a marker file within ``LOOK_S``.
    """
    deadline = time.monotonic() + LOOK_S
    for option, marker in markers:
        while not os.path.exists(marker):
            if time.monotonic() >= deadline:
                folder, host = os.path.dirname(marker), socket.gethostname()
                raise UserError(
                    f"{option}: host {host} does not share {folder} with the host that started this command; mount the "
                    f"same folder there on all hosts{advice}."
                )
            time.sleep(0.2)
