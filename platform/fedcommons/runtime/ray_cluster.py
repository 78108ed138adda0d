"""Connecting to Ray: to a running cluster, or to a Ray started on this machine that only we can use."""

import atexit
import logging
import os
import re
import secrets
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from fedcommons.errors import UserError, lacks_memory, sentence
from fedcommons.runtime import cpu_kind, tempdirs

if TYPE_CHECKING:
    from ray.job_config import JobConfig
    from ray.util.placement_group import PlacementGroup

INLINE_BYTES = 4 * 2**20
"""Smaller arguments and results travel with the call; for a cluster ray_cluster.yaml sets the same."""

AUTO = "auto"
"""In the place of a share of a GPU: what a process needs."""

PLACE_S = 30.0
"""Seconds for which a place in Ray is waited for, where other work may hold it."""

JOIN_S = 20
"""Seconds within which the cluster at RAY_ADDRESS must answer."""


def connect(num_cpus: int | None = None) -> None:
    """Connect to the cluster at RAY_ADDRESS, or start Ray on this machine with ``num_cpus`` (default: ``cores``).

    A Ray started here uses the GPUs in CUDA_VISIBLE_DEVICES, which Slurm sets. It listens on the loopback interface
    only, and asks every caller for a token, unless RAY_AUTH_MODE says otherwise. Its files, and the temporary ones of
    its workers, lie in a folder of mode 0700 (see ``scratch``) in RAY_TMPDIR, or where Python puts temporary files.

    Raises:
        UserError: no Ray answers at RAY_ADDRESS, none starts here, or a variable of Ray or Slurm has an invalid value.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    import ray

    if ray.is_initialized():
        return
    address = os.environ.get("RAY_ADDRESS", "local")
    on_sigterm = signal.getsignal(signal.SIGTERM)
    if address in ("", "local"):
        _start(num_cpus or cores())
    else:
        _require_answer(address)
        with _coming_up(f"RAY_ADDRESS={address!r}: that Ray cannot be joined"):
            ray.init(job_config=_job(), log_to_driver=False, logging_level=logging.ERROR)
    if callable(on_sigterm):  # Ray has put its own in its place
        with suppress(ValueError):  # only the main thread may, and only there Ray did
            signal.signal(signal.SIGTERM, on_sigterm)


@contextmanager
def _coming_up(what: str) -> Iterator[None]:
    """Turn what Ray raises while it starts or is joined into one sentence, and end what has started of it.

    Raises:
        UserError: in place of any error, except one for lack of memory, processes or room on the disk.
    """
    import ray

    try:
        yield
    except Exception as error:
        with suppress(Exception):  # of the half that has started
            ray.shutdown()
        if lacks_memory(error) or (isinstance(error, OSError) and error.errno):  # the system's, not Ray's own
            raise
        raise UserError(f"{what} ({sentence(error).rstrip('.')}).") from error


def _job() -> "JobConfig":
    """Ray lets workers look for modules in the current folder before all others, but not those of a client's job."""
    from ray.job_config import JobConfig

    return JobConfig(_client_job=True)


def _start(num_cpus: int | None) -> None:
    """Start Ray here; only callers with a token get in, and the token is in our processes' environment only."""
    import ray

    mode = os.environ.get("RAY_AUTH_MODE", "")
    if mode.lower() not in ("", "token", "disabled"):
        raise UserError(f"RAY_AUTH_MODE must be token or disabled, got {mode!r}.")  # Ray would take it for disabled
    if not mode:
        # Ray reads the mode at its import, which may have been long ago. Without a mode ray.init sets it to token.
        os.environ.pop("RAY_AUTH_MODE", None)
        os.environ["RAY_AUTH_TOKEN"] = os.environ.get("RAY_AUTH_TOKEN") or secrets.token_hex(32)
    folder = tempdirs.make(_base())
    atexit.register(ray.shutdown)  # before its folder goes: Ray's own may come after that
    with tempdirs.tempdir(folder), _loopback_only(), _coming_up("Ray does not start on this machine"):
        ray.init(
            address="local",  # never somebody else's Ray on this machine
            job_config=_job(),
            num_cpus=num_cpus,
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.ERROR,
            _temp_dir=str(folder / "r"),  # which Ray opens to everybody
            _system_config={"max_direct_call_object_size": INLINE_BYTES},
        )
    if not mode and os.environ.get("RAY_AUTH_MODE") != "token":
        ray.shutdown()
        raise UserError(f"Ray {ray.__version__} starts without authentication; fedcommons needs Ray 2.60 or newer.")
    if (at := ray.util.get_node_ip_address()) not in ("127.0.0.1", "::1"):
        warnings.warn(f"Ray {ray.__version__} listens at {at}: other machines can reach it.", stacklevel=3)


def _base() -> str:
    """Where the folder of a Ray that is started here is made: /tmp where the names of Ray's sockets would be too long.

    Raises:
        UserError: RAY_TMPDIR is too long, or cannot be written.
    """
    asked = os.environ.get("RAY_TMPDIR", "")
    base = os.path.realpath(asked or tempfile.gettempdir())
    socket = f"/{tempdirs.PREFIX}12345678/r/session_2026-01-01_00-00-00_000000_{os.getpid()}/sockets/plasma_store"
    room = (103 if sys.platform == "darwin" else 107) - len(socket)
    if not asked:
        return base if len(os.fsencode(base)) <= room else "/tmp"
    if len(os.fsencode(base)) > room:
        raise UserError(f"RAY_TMPDIR must have at most {room} characters, as sockets lie below it, got {asked!r}.")
    try:
        os.makedirs(base, exist_ok=True)
        with tempfile.TemporaryFile(dir=base):
            return base
    except OSError as error:
        raise UserError(f"RAY_TMPDIR={asked!r} cannot be written ({error.strerror}).") from None


@contextmanager
def _loopback_only() -> Iterator[None]:
    """Meanwhile a Ray that starts takes 127.0.0.1 for its node's address, and then its servers listen there alone.

    Ray does so on macOS and Windows, and with ``_node_ip_address`` it would take the machine's own address for it.
    """
    from ray._private import ray_constants

    name, before = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", ray_constants.ENABLE_RAY_CLUSTER  # read at Ray's import
    asked = os.environ.get(name)
    os.environ[name], ray_constants.ENABLE_RAY_CLUSTER = "0", False
    try:
        yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = before
        del os.environ[name]
        if asked is not None:
            os.environ[name] = asked


def _require_answer(address: str) -> None:
    """Refuse an address where nothing answers: ray.init would try for minutes and ignore Ctrl-C.

    It is tried in a separate process, which an alarm ends.
    """
    code = (
        f"import ray, signal, sys; signal.alarm({JOIN_S})\n"
        "try: ray.init(log_to_driver=False, logging_level='ERROR')\n"
        "except Exception as error: sys.exit('said:' + ' '.join(str(error.__cause__ or error).split()))"
    )
    tried = subprocess.run(
        [sys.executable, "-P", "-c", code], stdin=subprocess.DEVNULL, capture_output=True, text=True,
        encoding="utf-8", errors="replace",
    )  # fmt: skip
    if tried.returncode == 0:
        return
    why = " ".join(tried.stderr.rpartition("said:")[2].split()).partition(". ")[0].rstrip(".")
    if tried.returncode == -signal.SIGALRM:
        why = f"no Ray answers there within {JOIN_S} s"
    if "InvalidAuthToken" in tried.stderr:
        why = "that Ray asks for another token (RAY_AUTH_MODE=token and RAY_AUTH_TOKEN, or the file ~/.ray/auth_token)"
    raise UserError(f"RAY_ADDRESS={address!r}: {why}; name a Ray that runs, or unset it to start one on this machine.")


def cores() -> int | None:
    """The number of cores that Slurm or the system leaves to this process; None for all cores of the machine.

    Raises:
        UserError: SLURM_CPUS_PER_TASK is not a number of cores.
    """
    limits = [len(os.sched_getaffinity(0))] if hasattr(os, "sched_getaffinity") else []
    if asked := os.environ.get("SLURM_CPUS_PER_TASK", ""):
        if not re.fullmatch("0*[1-9][0-9]{0,8}", asked):
            raise UserError(f"SLURM_CPUS_PER_TASK must be a number of cores, 1 or more, got {asked[:80]!r}.")
        limits.append(int(asked))
    fewest = min(limits, default=None)
    return fewest if fewest != os.cpu_count() else None


def gpu_share(wanted: float | str) -> float:
    """The share of a GPU to ask for: ``wanted``, or 0 without a GPU, as Ray would wait for one forever.

    ``AUTO`` is a whole one here; see ``runs.gpu_need``.
    """
    import ray

    if ray.cluster_resources().get("GPU", 0) <= 0:
        return 0
    return 1.0 if isinstance(wanted, str) else wanted


def describe(gpus_per_actor: float | str) -> str:
    """The cores, GPUs and nodes for our work, in words."""
    import ray

    nodes, pin = ray.nodes(), pinned(gpus_per_actor)
    resources = cpu_kind.resources(nodes, pin)
    gpus = int(resources["GPU"])
    return f"{int(resources['CPU'])} cores, {gpus} GPU{'s' if gpus != 1 else ''}, {cpu_kind.described(nodes, pin)}"


def bundle(gpus_per_actor: float | str) -> dict[str, float]:
    """The resources that one process that trains clients reserves."""
    gpus = gpu_share(gpus_per_actor)
    return {"CPU": 1.0, "GPU": gpus} if gpus else {"CPU": 1.0}


def pinned(gpus_per_actor: float | str) -> dict[str, str]:
    """The labels of the nodes that all our processes go to, as bits depend on the CPU; see ``kinds.chosen``."""
    import ray

    return cpu_kind.chosen(ray.nodes(), gpu_share(gpus_per_actor))


def cpu_of_actors(gpus_per_actor: float | str) -> list[str]:
    """The kind of CPU that actors have, where we are connected to a Ray whose nodes have labels."""
    import ray

    pin = pinned(gpus_per_actor) if ray.is_initialized() else {}
    return [pin[cpu_kind.CPU]] if pin else []


def reserve(
    bundles: Sequence[Mapping[str, float]],
    pin: Mapping[str, str],
    what: str,
    wait_s: float | None = None,
    advice: str = "",
) -> "PlacementGroup":
    """Reserve these resources on nodes with these labels, until ``free`` gives them back.

    Args:
        what: what needs them, each a bundle, for the message.
        wait_s: ``PLACE_S`` if None.
        advice: what else would help, for the message.

    Raises:
        UserError: other work holds them for longer.
    """
    from ray.util import placement_group

    wait_s = PLACE_S if wait_s is None else wait_s
    group = placement_group([dict(one) for one in bundles], bundle_label_selector=[dict(pin)] * len(bundles))
    deadline = time.monotonic() + wait_s
    try:
        while not group.wait(min(0.5, wait_s)):  # not longer, as Ctrl-C is not heard meanwhile
            if time.monotonic() >= deadline:
                break
        else:
            return group
    except BaseException:
        free(group)
        raise
    free(group)
    needs, has = _in_words(bundles[0]), free_resources()
    raise UserError(
        f"{what} found no place in {wait_s:g} s: each needs {needs}, and Ray has {has} free; wait for what runs there "
        f"to end{advice}."
    )


def free_resources() -> str:
    """Return the free cores and GPUs, in words."""
    import ray

    return _in_words(ray.available_resources())


def _in_words(resources: Mapping[str, float]) -> str:
    return f"{resources.get('CPU', 0):g} CPU and {resources.get('GPU', 0):g} GPU"


def free(group: "PlacementGroup") -> None:
    """Give back what ``reserve`` has reserved; what still runs there ends."""
    from ray.util import remove_placement_group

    remove_placement_group(group)


def require_actors(n: int, gpus_per_actor: float | str) -> None:
    """Refuse a run whose ``n`` actors can never all have their resources; Ray would wait forever.

    Raises:
        UserError: the nodes of one kind are too few for the run's actors, or see ``pinned``.
    """
    import ray

    resources = cpu_kind.resources(ray.nodes(), pinned(gpus_per_actor))
    for kind, each in bundle(gpus_per_actor).items():
        has = resources[kind]
        room = int(has / each + 1e-9) if each >= 1 else int(has) * int(1 / each + 1e-9)  # a share lies on one GPU
        if n > room:
            raise UserError(
                f"federation.actors: one run needs {n * each:g} {kind}, and Ray has {has:g}, room for {room} such "
                "actors; use fewer or federation.executor serial."
            )
