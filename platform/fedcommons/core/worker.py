"""What one process holds for a whole run, and how it is set up."""

import ctypes
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

import numpy as np
import torch

from fedcommons.core.algorithm import Algorithm
from fedcommons.core.client_worker import Work
from fedcommons.core.executor import J, R, S
from fedcommons.data.clients import Clients
from fedcommons.data.examples import Examples
from fedcommons.errors import UserError, somebodys
from fedcommons.runtime import torch_settings
from fedcommons.runtime.gpu_memory import is_lost, with_room

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
"""Of glibc's malloc.h."""


def default_device() -> torch.device:
    """The GPU this process was given, if any, prepared so that processes round alike; else the CPU.

    Raises:
        UserError: the GPU serves this process no more.
    """
    if not torch_settings.has_gpu():
        return torch.device("cpu")
    if is_lost():
        raise UserError("an earlier error has cut this process off from its GPU: start a new process.")
    torch_settings.prepare_gpu()
    return torch.device("cuda")


def require_precision(field: str, precision: str, device: torch.device) -> None:
    """Refuse what a GPU can only imitate: tf32 and bf16 on one without such numbers.

    Raises:
        UserError: it has none.
    """
    if device.type == "cuda" and precision in ("tf32", "bf16"):
        major, minor = torch.cuda.get_device_capability(device)
        if major < 8:
            raise UserError(
                f"{field} {precision} needs a GPU of compute capability 8.0 or newer, and "
                f"{torch.cuda.get_device_name(device)} has {major}.{minor}: use fp32."
            )


def set_up_process() -> None:
    """Use one torch thread, as more would round differently, and keep freed memory in the process.

    By default glibc returns large blocks to the system, and using them again costs page faults: 5 % of VGG-11's time.
    """
    torch.set_num_threads(1)
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # glibc only
    if mallopt:
        mallopt(M_MMAP_THRESHOLD, 1 << 30)
        mallopt(M_TRIM_THRESHOLD, (1 << 31) - 1)


_thread = threading.RLock()


def _forked() -> None:
    global _thread
    if _thread.acquire(blocking=False):
        _thread.release()
    else:  # held by a thread that this process does not have
        _thread = threading.RLock()


os.register_at_fork(after_in_child=_forked)


@contextmanager
def only_thread() -> Iterator[None]:
    """Play experiments; meanwhile no other thread of this process can. The same thread can, within this, again.

    Raises:
        UserError: another thread does.
    """
    lock = _thread  # whatever a fork within this does to the name
    if not lock.acquire(blocking=False):
        raise UserError(
            "another thread of this process is in an experiment, and torch's settings and random state are the "
            "process's: use one thread, or processes of their own."
        )
    try:
        yield
    finally:
        lock.release()


@contextmanager
def _draws_as_before() -> Iterator[None]:
    """Restore the states of the default random generators afterwards; those of a GPU that is lost are lost too."""
    with torch.random.fork_rng(devices=[]):
        before = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() and not is_lost() else []
        try:
            yield
        finally:
            if before and not is_lost():
                torch.cuda.set_rng_state_all(before)


@contextmanager
def fresh_torch() -> Iterator[None]:
    """Run with torch's own defaults, whatever the caller has set, and restore the caller's settings afterwards.

    Default type float32, default device the CPU, gradients on, no autocast, and the rest of ``torch_settings``. The
    number of threads, which ``set_up_process`` changes, and the state of the default random generators, which are
    keyed, are restored too. All of this belongs to the process, so only one of its threads can be in here.

    Raises:
        UserError: another thread of this process is.
    """
    with ExitStack() as settings:
        settings.enter_context(only_thread())
        settings.enter_context(_draws_as_before())
        settings.callback(torch.set_num_threads, torch.get_num_threads())
        settings.enter_context(torch_settings.usual())
        settings.enter_context(np.errstate(divide="warn", over="warn", under="ignore", invalid="warn"))
        settings.enter_context(torch.inference_mode(False))  # ends no_grad as well
        if torch.get_default_device().type != "cpu":  # a device's context slows every call of torch down
            settings.enter_context(torch.device("cpu"))
        yield


def give_back_freed() -> None:
    """Return freed memory, which ``set_up_process`` keeps, to the system, when much less is needed than before."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):
        libc.malloc_trim(0)


@dataclass(frozen=True)
class RunData:
    """All data of a run: what clients train on, their own real data, and named sets for evaluation.

    Clients, own and pool are rows of one store, so a process holds every example once.

    pool: the shared examples, in the parts that clients got; None if nothing is shared. n_classes: the number of the
    labels' classes, which is the width of logits; None: not known; 0: labels are no classes. tests: each client's own
    test examples, in the order of the clients; None: there are none. serves: whether the server holds the pool, so that
    a method's jobs at the server have it, as ``pool`` whose store is the pool alone; else they have None.
    """

    clients: Clients
    own: Clients
    sets: Mapping[str, Examples] = field(default_factory=dict)
    pool: Clients | None = None
    n_classes: int | None = None
    tests: Clients | None = None
    serves: bool = False

    def to(self, device: torch.device) -> "RunData":
        """The same data on ``device``; parts that share a store still share it there."""
        moved: dict[int, Examples] = {}

        def move(examples: Examples) -> Examples:
            if id(examples) not in moved:
                moved[id(examples)] = examples.to(device)
            return moved[id(examples)]

        def those(clients: Clients) -> Clients:
            return clients.on(move(clients.store))

        clients = those(self.clients)
        own = clients if self.own is self.clients else those(self.own)
        sets = {name: move(examples) for name, examples in self.sets.items()}
        pool, tests = (None if part is None else those(part) for part in (self.pool, self.tests))
        return RunData(clients, own, sets, pool, self.n_classes, tests, self.serves)


@dataclass(frozen=True)
class Worker:
    """A module with its optimizer, the algorithm and the data, on one device."""

    work: Work
    algorithm: Algorithm
    data: RunData

    def run(self, function: Callable[["Worker", S, J], R], shared: S, job: J) -> R:
        """The job's result, tried once more where the GPU had no memory left for it.

        What an earlier job has told the module of its round is forgotten, and so is its noise.
        """
        name = getattr(function, "__name__", "a job")  # a partial has none

        def play() -> R:
            self.work.begin(0)
            self.work.noise.close()
            for parameter in self.work.named.values():
                parameter.grad = None
            with somebodys(self.work.module, "", name.replace("_", " ").strip()):
                return function(self, shared, job)

        return with_room(play)
