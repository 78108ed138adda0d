"""The objects that a worker process stores for a whole run, and the process's settings of torch, GPU and memory."""

import ctypes
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace

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
    """Return this process's GPU, with settings by which all processes round equally; the CPU if there is no GPU.

    Raises:
        UserError: an earlier error has made the GPU unusable for this process.
    """
    if not torch_settings.has_gpu():
        return torch.device("cpu")
    if is_lost():
        raise UserError("an earlier error has made the GPU unusable for this process: start a new process.")
    torch_settings.prepare_gpu()
    return torch.device("cuda")


def require_precision(field: str, precision: str, device: torch.device) -> None:
    """Check that the GPU supports the precision in hardware; tf32 and bf16 need compute capability 8.0.

    field: name of the experiment's field in the message.

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
    """Set torch to one thread, because more threads would round differently. Keep freed memory in the process.

    By default glibc returns large blocks of memory to the system. The next use of such a block then costs page faults,
    which take 5 % of the training time of VGG-11.
    """
    torch.set_num_threads(1)
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # only glibc has mallopt
    if mallopt:
        mallopt(M_MMAP_THRESHOLD, 1 << 30)
        mallopt(M_TRIM_THRESHOLD, (1 << 31) - 1)


_thread = threading.RLock()


def _forked() -> None:
    global _thread
    if _thread.acquire(blocking=False):
        _thread.release()
    else:  # a thread that the child process lacks holds the lock
        _thread = threading.RLock()


os.register_at_fork(after_in_child=_forked)


@contextmanager
def only_thread() -> Iterator[None]:
    """Context in which only the current thread of this process may run experiments; contexts may be nested.

    Raises:
        UserError: another thread is in this context.
    """
    lock = _thread  # kept, because a fork within the context may replace ``_thread``
    if not lock.acquire(blocking=False):
        raise UserError("another thread of this process is in an experiment: use one thread, or separate processes.")
    try:
        yield
    finally:
        lock.release()


@contextmanager
def _draws_as_before() -> Iterator[None]:
    """Context that restores the states of torch's random generators at its end, except on an unusable GPU."""
    with torch.random.fork_rng(devices=[]):
        before = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() and not is_lost() else []
        try:
            yield
        finally:
            if before and not is_lost():
                torch.cuda.set_rng_state_all(before)


@contextmanager
def fresh_torch() -> Iterator[None]:
    """Context with torch's default settings, whatever the caller has set; restores the caller's settings afterwards.

    The defaults are: type float32, device CPU, gradients on, no autocast, and the settings of ``torch_settings``. The
    context also restores the number of threads, which ``set_up_process`` changes, and the states of the default random
    generators, which the run seeds. All threads share these settings, so only one thread can be in the context.

    Raises:
        UserError: another thread of this process is in this context.
    """
    with ExitStack() as settings:
        settings.enter_context(only_thread())
        settings.enter_context(_draws_as_before())
        settings.callback(torch.set_num_threads, torch.get_num_threads())
        settings.enter_context(torch_settings.usual())
        settings.enter_context(np.errstate(divide="warn", over="warn", under="ignore", invalid="warn"))
        settings.enter_context(torch.inference_mode(False))  # turns gradients on, even if the caller turned them off
        if torch.get_default_device().type != "cpu":  # not for "cpu": this context slows down every call of torch
            settings.enter_context(torch.device("cpu"))
        yield


def give_back_freed() -> None:
    """Return freed memory, which ``set_up_process`` keeps in the process, to the operating system."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):
        libc.malloc_trim(0)


@accepts_old_names(own="real")
@dataclass(frozen=True)
class RunData:
    """All data of a run: the clients' data, the shared examples and the data sets for evaluation.

    clients: each client's training data, which may contain shared examples. real: each client's real data. pool: the
    shared examples that each client received; None without sharing. sets: name -> data set for evaluation. n_classes:
    number of classes; None: not known; 0: labels are not classes. tests: each client's test examples, or None. serves:
    whether the server may use the pool. public: examples without labels that belong to no client, or None. In a job on
    the server, ``clients`` and ``real`` are empty; if ``serves`` is False, ``pool`` is None.
    """

    clients: Clients
    real: Clients
    sets: Mapping[str, Examples] = field(default_factory=dict)
    pool: Clients | None = None
    n_classes: int | None = None
    tests: Clients | None = None
    serves: bool = False
    public: Examples | None = None

    def to(self, device: torch.device) -> "RunData":
        """Return the same data on ``device``; a table of examples that several fields use is copied only once."""
        parts = {name: getattr(self, name) for name in ("clients", "real", "pool", "tests")}
        tables = [
            *self.sets.values(),
            *([self.public] if self.public else []),
            *(part.store for part in parts.values() if part is not None),
        ]
        moved = {id(x): x.to(device) for x in {id(x): x for x in tables}.values()}  # equal tables may differ in factors
        clients = {id(part): part.on(moved[id(part.store)]) for part in parts.values() if part is not None}
        sets = {name: moved[id(examples)] for name, examples in self.sets.items()}
        public = self.public and moved[id(self.public)]
        return replace(
            self, sets=sets, public=public, **{name: part and clients[id(part)] for name, part in parts.items()}
        )


@dataclass(frozen=True)
class Worker:
    """The argument ``worker`` of a job's function: module and optimizer (``work``), algorithm, data, on one device."""

    work: Work
    algorithm: Algorithm
    data: RunData

    def run(self, function: Callable[["Worker", S, J], R], shared: S, job: J) -> R:
        """Return ``function(self, shared, job)``; the function runs again if the GPU had too little memory.

        The progress (``Work.clock``) and the noise of earlier jobs are reset first.
        """
        name = getattr(function, "__name__", "a job")  # a functools.partial has no name

        def play() -> R:
            self.work.begin(0)
            self.work.noise.close()
            for parameter in self.work.named.values():
                parameter.grad = None
            with user_code_context(self.work.module, "", name.replace("_", " ").strip()):
                return function(self, shared, job)

        return with_room(play)
