"""Connection to Ray: to a running cluster, or to a private Ray that is started on this machine."""

import atexit
import logging
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from fedcommons.errors import UserError, lacks_memory, sentence
from fedcommons.runtime import allocation, cpu_kind, tempdirs

if TYPE_CHECKING:
    from ray.util.placement_group import PlacementGroup

INLINE_BYTES = 4 * 2**20
"""Number of bytes below which Ray sends arguments and results inside a call; clusters: cluster/environment.sh."""

AUTO = "auto"
"""Value of the option ``federation.gpus_per_actor`` for which the needed share of a GPU is measured before the run."""

PLACE_S = 30.0
"""Maximum seconds to wait until other programs free the resources that a run requests from Ray."""

JOIN_S = 20
"""Seconds within which the cluster at RAY_ADDRESS must answer."""

DASHBOARD = "FEDCOMMONS_RAY_DASHBOARD"
"""Environment variable with the port of Ray's dashboard on 127.0.0.1; `ray list` and `ray job` need the dashboard."""


def connect(num_cpus: int | None = None) -> None:
    """Connect to the Ray cluster at the environment variable RAY_ADDRESS, or start Ray on this machine.

    A Ray started here has ``num_cpus`` cores (default: ``allocation.cores``) and the GPUs in CUDA_VISIBLE_DEVICES.
    Slurm sets both limits. Ray listens on the loopback interface only, and requires a token unless RAY_AUTH_MODE
    disables tokens. The files of Ray and the temporary files of its workers are in a folder that only this user can
    enter (``tempdirs``), in RAY_TMPDIR or in Python's temporary folder.

    Raises:
        UserError: no Ray answers at RAY_ADDRESS, Ray does not start, or a variable of Ray or Slurm is invalid.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    import ray

    if ray.is_initialized():
        return
    address = os.environ.get("RAY_ADDRESS", "local")
    on_sigterm = signal.getsignal(signal.SIGTERM)
    if address in ("", "local"):
        _start(num_cpus or allocation.cores())
    else:
        _require_answer(address)
        with _coming_up(f"RAY_ADDRESS={address!r}: that Ray cannot be joined"):
            ray.init(**_options())
    if callable(on_sigterm):  # restore the caller's handler, which Ray has replaced
        with suppress(ValueError):  # Python and Ray set handlers only in the main thread
            signal.signal(signal.SIGTERM, on_sigterm)


@contextmanager
def _coming_up(what: str) -> Iterator[None]:
    """Convert errors in this context, while Ray starts or a cluster is joined, to a ``UserError`` of one sentence.

    A partly started Ray is shut down. what: beginning of the sentence.

    Raises:
        UserError: Ray raised an error. Errors for lack of memory, processes or disk space are raised unchanged.
    """
    import ray

    try:
        yield
    except Exception as error:
        with suppress(Exception):  # the shutdown of a partly started Ray may fail
            ray.shutdown()
        if lacks_memory(error) or (isinstance(error, OSError) and error.errno):  # raised by the system, not by Ray
            raise
        raise UserError(f"{what} ({sentence(error).rstrip('.')}).") from error


def _options() -> dict[str, Any]:
    """Return options of ``ray.init``: do not put the current folder first in the workers' ``sys.path``; log errors."""
    from ray.job_config import JobConfig

    return {"job_config": JobConfig(_client_job=True), "log_to_driver": False, "logging_level": logging.ERROR}


def _start(num_cpus: int | None) -> None:
    """Start Ray on this machine. Programs that connect to Ray need a token, unless RAY_AUTH_MODE is disabled.

    The token is in the environment of this process and its children.

    Raises:
        UserError: Ray does not start or starts without authentication, or RAY_AUTH_MODE is invalid.
    """
    import ray

    mode = os.environ.get("RAY_AUTH_MODE", "")
    # With any other mode, Ray would require no token from its callers.
    if mode.lower() not in ("", "token", "disabled"):
        raise UserError(f"RAY_AUTH_MODE must be token or disabled, got {mode!r}.")
    dashboard = _dashboard_options(mode)
    if not mode:
        # An empty mode is removed, because Ray has read the mode at its import. Without a mode, ray.init uses tokens.
        os.environ.pop("RAY_AUTH_MODE", None)
        os.environ["RAY_AUTH_TOKEN"] = os.environ.get("RAY_AUTH_TOKEN") or secrets.token_hex(32)
    folder = tempdirs.make(base())
    atexit.register(ray.shutdown)  # must run before the folder is removed; Ray's own handler may run later
    with tempdirs.tempdir(folder), _loopback_only(), _coming_up("Ray does not start on this machine"):
        ray.init(
            address="local",  # start a new Ray instead of joining another user's Ray
            num_cpus=num_cpus,
            num_gpus=allocation.gpus(),
            **dashboard,
            _temp_dir=str(folder / "r"),  # a subfolder, because Ray makes it readable for all users
            _system_config={"max_direct_call_object_size": INLINE_BYTES},
            **_options(),
        )
    if not mode and os.environ.get("RAY_AUTH_MODE") != "token":
        ray.shutdown()
        raise UserError(f"Ray {ray.__version__} starts without authentication; fedcommons needs Ray 2.60 or newer.")
    if (at := ray.util.get_node_ip_address()) not in ("127.0.0.1", "::1"):
        warnings.warn(f"Ray {ray.__version__} listens at {at}: other machines can reach it.", stacklevel=3)


def _dashboard_options(mode: str) -> dict[str, Any]:
    """Return options of ``ray.init`` for Ray's dashboard; raise ``UserError`` if they cannot be used."""
    if not (port := os.environ.get(DASHBOARD, "")):
        return {"include_dashboard": False}
    if port not in map(str, range(1024, 2**16)):
        raise UserError(f"{DASHBOARD} must be a port from 1024 to 65535, got {port[:80]!r}.")
    if mode.lower() == "disabled" or not os.environ.get("RAY_AUTH_TOKEN"):
        raise UserError(f"{DASHBOARD} needs RAY_AUTH_MODE=token and a secret in RAY_AUTH_TOKEN.")
    if find_spec("aiohttp_cors") is None:
        raise UserError(f"{DASHBOARD} needs more packages: pip install 'ray[default]'.")
    return {"include_dashboard": True, "dashboard_host": "127.0.0.1", "dashboard_port": int(port)}


def base() -> str:
    """Return the parent folder for the files of a Ray that is started here: RAY_TMPDIR or Python's temporary folder.

    The result is /tmp if the paths of Ray's sockets in Python's temporary folder would be too long.

    Raises:
        UserError: the path RAY_TMPDIR is too long, or the folder cannot be written.
    """
    requested = os.environ.get("RAY_TMPDIR", "")
    parent = os.path.realpath(requested or tempfile.gettempdir())
    socket = f"/{tempdirs.PREFIX}12345678/r/session_2026-01-01_00-00-00_000000_{os.getpid()}/sockets/plasma_store"
    room = (103 if sys.platform == "darwin" else 107) - len(socket)
    if not requested:
        return parent if len(os.fsencode(parent)) <= room else "/tmp"
    if len(os.fsencode(parent)) > room:
        raise UserError(
            f"RAY_TMPDIR must have at most {room} characters, as paths of sockets in it have a maximum "
            f"length, got {requested!r}."
        )
    try:
        os.makedirs(parent, exist_ok=True)
        with tempfile.TemporaryFile(dir=parent):
            return parent
    except OSError as error:
        raise UserError(f"RAY_TMPDIR={requested!r} cannot be written ({error.strerror}).") from None


@contextmanager
def _loopback_only() -> Iterator[None]:
    """Let a Ray that starts in this context listen only at 127.0.0.1, so that other machines cannot reach it.

    Ray does so by default on macOS and Windows. The option ``_node_ip_address`` does not help: Ray would replace
    127.0.0.1 by the network address of the machine.
    """
    from ray._private import ray_constants

    # Ray reads the environment variable only at its import, so the constant in Ray is changed too.
    name, before = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", ray_constants.ENABLE_RAY_CLUSTER
    value = os.environ.get(name)
    os.environ[name], ray_constants.ENABLE_RAY_CLUSTER = "0", False
    try:
        yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = before
        del os.environ[name]
        if value is not None:
            os.environ[name] = value


def _require_answer(address: str) -> None:
    """Check that a Ray answers at the address within ``JOIN_S`` seconds.

    A separate process, which an alarm ends, tries the connection: ``ray.init`` would try for minutes and ignore Ctrl-C.

    Raises:
        UserError: no Ray answers, or it refuses the connection.
    """
    code = (
        f"import ray, signal, sys; signal.alarm({JOIN_S})\n"
        "try: ray.init(log_to_driver=False, logging_level='ERROR')\n"
        "except Exception as error: sys.exit('said:' + ' '.join(str(error.__cause__ or error).split()))"
    )
    process = subprocess.run(
        [sys.executable, "-P", "-c", code], stdin=subprocess.DEVNULL, capture_output=True, text=True,
        encoding="utf-8", errors="replace",
    )  # fmt: skip
    if process.returncode == 0:
        return
    reason = " ".join(process.stderr.rpartition("said:")[2].split()).partition(". ")[0].rstrip(".")
    if process.returncode == -signal.SIGALRM:
        reason = f"no Ray answers there within {JOIN_S} s, or it requires TLS (`. cluster/environment.sh`)"
    if "InvalidAuthToken" in process.stderr:
        reason = (
            "that Ray requires another token (RAY_AUTH_MODE=token and RAY_AUTH_TOKEN, or the file ~/.ray/auth_token)"
        )
    raise UserError(
        f"RAY_ADDRESS={address!r}: {reason}; name a running Ray, or unset RAY_ADDRESS to start Ray on this machine."
    )


def gpu_share(wanted: float | str) -> float:
    """Return the share of a GPU to request from Ray for a process: ``wanted``, or 0 if Ray has no GPU.

    ``AUTO`` means a whole GPU here; ``tune.gpu_share`` measures the needed share.
    """
    import ray

    if ray.cluster_resources().get("GPU", 0) <= 0:
        return 0
    return 1.0 if isinstance(wanted, str) else wanted


def describe(gpus_per_actor: float | str) -> str:
    """Return a text with the numbers of CPU cores, GPUs and nodes that a run can use."""
    import ray

    nodes, pin = ray.nodes(), node_labels(gpus_per_actor)
    resources = cpu_kind.resources(nodes, pin)
    gpus = int(resources["GPU"])
    return f"{int(resources['CPU'])} cores, {gpus} GPU{'s' if gpus != 1 else ''}, {cpu_kind.describe_nodes(nodes, pin)}"


def bundle(gpus_per_actor: float | str) -> dict[str, float]:
    """Return the resources that Ray reserves for a process that trains clients: one core and a share of a GPU."""
    gpus = gpu_share(gpus_per_actor)
    return {"CPU": 1.0, "GPU": gpus} if gpus else {"CPU": 1.0}


def node_labels(gpus_per_actor: float | str) -> dict[str, str]:
    """Return the labels of the nodes on which a run's processes may start; see ``cpu_kind.choose_kind``."""
    import ray

    return cpu_kind.choose_kind(ray.nodes(), gpu_share(gpus_per_actor))


def cpu_of_actors(gpus_per_actor: float | str) -> list[str]:
    """Return the actors' kind of CPU, in a list; an empty list without Ray and for a Ray without labelled nodes."""
    import ray

    pin = node_labels(gpus_per_actor) if ray.is_initialized() else {}
    return [pin[cpu_kind.CPU]] if pin else []


def reserve(
    bundles: Sequence[Mapping[str, float]],
    pin: Mapping[str, str],
    what: str,
    wait_s: float | None = None,
    advice: str = "",
) -> "PlacementGroup":
    """Reserve resources in Ray, one bundle per process, until ``free`` releases them.

    Args:
        bundles: for each process, its numbers of cores and GPUs.
        pin: labels that the nodes must have.
        what: name of the processes, for the error message.
        wait_s: seconds to wait; None: ``PLACE_S``.
        advice: addition to the error message.

    Raises:
        UserError: other programs use the resources for more than ``wait_s`` seconds.
    """
    from ray.util import placement_group

    wait_s = PLACE_S if wait_s is None else wait_s
    group = placement_group(
        [dict(resources) for resources in bundles], bundle_label_selector=[dict(pin)] * len(bundles)
    )
    deadline, is_reserved = time.monotonic() + wait_s, False
    try:
        # The waits are short, because Ctrl-C has no effect during a wait.
        while not (is_reserved := group.wait(min(0.5, wait_s))) and time.monotonic() < deadline:
            continue
    finally:
        if not is_reserved:
            free(group)
    if is_reserved:
        return group
    needs, has = _in_words(bundles[0]), free_resources()
    raise UserError(
        f"{what} got no resources in {wait_s:g} s: each needs {needs}, and Ray has {has} free; wait until other "
        f"programs end{advice}."
    )


def free_resources() -> str:
    """Return the numbers of free CPU cores and GPUs as text, such as "3 CPU and 0.5 GPU"."""
    import ray

    return _in_words(ray.available_resources())


def _in_words(resources: Mapping[str, float]) -> str:
    return f"{resources.get('CPU', 0):g} CPU and {resources.get('GPU', 0):g} GPU"


def free(group: "PlacementGroup") -> None:
    """Release the resources from ``reserve``. Ray ends the processes that still use them."""
    from ray.util import remove_placement_group

    remove_placement_group(group)


def require_actors(n: int, gpus_per_actor: float | str) -> None:
    """Check that Ray can run ``n`` actors at the same time; otherwise Ray would wait forever.

    Raises:
        UserError: the usable nodes have too few resources, or no node is usable (see ``cpu_kind.choose_kind``).
    """
    import ray

    resources = cpu_kind.resources(ray.nodes(), node_labels(gpus_per_actor))
    for kind, each in bundle(gpus_per_actor).items():
        has = resources[kind]
        # A process cannot use parts of two GPUs, so for shares below 1 the processes that fit are counted per GPU.
        room = int(has / each + 1e-9) if each >= 1 else int(has) * int(1 / each + 1e-9)
        if n > room:
            raise UserError(
                f"federation.actors: one run needs {n} x {each:g} {kind}, and Ray has {has:g}, room for {room} such "
                f"actors{', as no process can use parts of two GPUs' * (n * each <= has)}; use fewer actors"
                f"{', a smaller federation.gpus_per_actor' * (kind == 'GPU')} or federation.executor serial."
            )
