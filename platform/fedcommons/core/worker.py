"""Objects that one worker process stores for a whole run, and the set-up of the process."""

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
from fedcommons.deprecated import accepts_old_names
from fedcommons.errors import UserError, user_code_context
from fedcommons.runtime import torch_settings
from fedcommons.runtime.gpu_memory import is_lost, with_room

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
"""Options of ``mallopt``, as defined in glibc's malloc.h."""


def default_device() -> torch.device:
    """Return this process's GPU, prepared so that all processes round alike; without a GPU, return the CPU.

    Raises:
        UserError: an earlier error has made the GPU unusable for this process.
    """
    if not torch_settings.has_gpu():
        return torch.device("cpu")
    if is_lost():
        raise UserError("an earlier error has cut this process off from its GPU: start a new process.")
    torch_settings.prepare_gpu()
    return torch.device("cuda")


def require_precision(field: str, precision: str, device: torch.device) -> None:
    """Refuse tf32 and bf16 on a GPU that can only emulate these number types.

    Raises:
        UserError: the GPU lacks the number type ``precision``.
    """
    if device.type == "cuda" and precision in ("tf32", "bf16"):
        major, minor = torch.cuda.get_device_capability(device)
        if major < 8:
            raise UserError(
                f"{field} {precision} needs a GPU of compute capability 8.0 or newer, and "
                f"{torch.cuda.get_device_name(device)} has {major}.{minor}: use fp32."
            )


def set_up_process() -> None:
    """Use one torch thread, because more threads would round differently, and keep freed memory in the process.

    By default glibc returns large blocks to the system. Their reuse then costs page faults: 5 % of VGG-11's time.
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
    else:  # locked by a thread that does not exist in the child process
        _thread = threading.RLock()


os.register_at_fork(after_in_child=_forked)


@contextmanager
def only_thread() -> Iterator[None]:
    """Allow only the current thread of this process to run experiments; the context may be nested in this thread.

    Raises:
        UserError: another thread is in this context.
    """
    lock = _thread  # a fork within the context may rebind the global name
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
    """Restore the states of the default random generators afterwards, except those of a GPU that became unusable."""
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

    The defaults are: type float32, device CPU, gradients on, no autocast, and the settings of ``torch_settings``. The
    context also restores the number of threads, which ``set_up_process`` changes, and the states of the default random
    generators, which are keyed. All of these settings belong to the process, so only one thread can be in this context.

    Raises:
        UserError: another thread of this process is in this context.
    """
    with ExitStack() as settings:
        settings.enter_context(only_thread())
        settings.enter_context(_draws_as_before())
        settings.callback(torch.set_num_threads, torch.get_num_threads())
        settings.enter_context(torch_settings.usual())
        settings.enter_context(np.errstate(divide="warn", over="warn", under="ignore", invalid="warn"))
        settings.enter_context(torch.inference_mode(False))  # ends no_grad as well
        if torch.get_default_device().type != "cpu":  # only if needed: a device context slows down every call of torch
            settings.enter_context(torch.device("cpu"))
        yield


def give_back_freed() -> None:
    """Return freed memory to the system (``set_up_process`` keeps it), for use when much less memory is needed."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):
        libc.malloc_trim(0)


@accepts_old_names(own="real")
@dataclass(frozen=True)
class RunData:
    """All data of a run: the clients' training data, their own real data, and named data sets for evaluation.

    ``clients``, ``own`` and ``pool`` are rows of one store, so a process stores every example once.

    pool: the shared examples, split as clients received them; None without sharing. n_classes: number of classes, which
    is the width of logits; None: not known; 0: labels are no classes. tests: each client's own test examples, in the
    order of the clients; None: no test examples. serves: whether the server has the pool. If so, a method's jobs at the
    server get it as ``pool``, whose store has only the pool; else the jobs get None.
    """

    clients: Clients
    real: Clients
    sets: Mapping[str, Examples] = field(default_factory=dict)
    pool: Clients | None = None
    n_classes: int | None = None
    tests: Clients | None = None
    serves: bool = False

    def to(self, device: torch.device) -> "RunData":
        """Return the same data on ``device``; parts that share a store still share a store there."""
        moved: dict[int, Examples] = {}

        def move(examples: Examples) -> Examples:
            if id(examples) not in moved:
                moved[id(examples)] = examples.to(device)
            return moved[id(examples)]

        def moved_clients(clients: Clients) -> Clients:
            return clients.on(move(clients.store))

        clients = moved_clients(self.clients)
        own_data = clients if self.real is self.clients else moved_clients(self.real)
        sets = {name: move(examples) for name, examples in self.sets.items()}
        pool, tests = (None if part is None else moved_clients(part) for part in (self.pool, self.tests))
        return RunData(clients, own_data, sets, pool, self.n_classes, tests, self.serves)


@dataclass(frozen=True)
class Worker:
    """A module with its optimizer, the algorithm and the data, on one device."""

    work: Work
    algorithm: Algorithm
    data: RunData

    def run(self, function: Callable[["Worker", S, J], R], shared: S, job: J) -> R:
        """Return the job's result; the job runs once more if the GPU had too little memory.

        The clock and the noise of earlier jobs are reset first.
        """
        name = getattr(function, "__name__", "a job")  # a partial has none

        def play() -> R:
            self.work.begin(0)
            self.work.noise.close()
            for parameter in self.work.named.values():
                parameter.grad = None
            with user_code_context(self.work.module, "", name.replace("_", " ").strip()):
                return function(self, shared, job)

        return with_room(play)
