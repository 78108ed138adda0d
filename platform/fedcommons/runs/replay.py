"""Replay: train one client of one round of a run again in this process, for example a client that failed.

The client starts from the same state as in the run, and its random draws have the same keys. So the results are the
same, bit for bit on the same kind of machine. The run folder is only read.
"""

import shlex
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from fedcommons.config.dotted import override
from fedcommons.config.experiment import Experiment
from fedcommons.core.algorithm import ChoosesClients, State
from fedcommons.core.block_sum import add_blocks
from fedcommons.core.executor import Executor
from fedcommons.core.worker import fresh_torch
from fedcommons.errors import UserError
from fedcommons.federation import checkpoint, rounds
from fedcommons.federation.client_block import train_block
from fedcommons.federation.client_memory import ClientMemory
from fedcommons.federation.rounds import Standing
from fedcommons.flat_tensors import Flat, data, nbytes
from fedcommons.runs import run_salts
from fedcommons.runs.assemble import Assembled, assemble, synthetic_images
from fedcommons.runs.build import build, own_options
from fedcommons.runs.worker import run_name
from fedcommons.storage.artifact_store import Store
from fedcommons.tracking.run_folder import planned_rounds, read_config, require_same_data


@dataclass(frozen=True)
class Replayed:
    """A replayed client's numbers of examples, and the content of its reply.

    sums: the tensors, by name, that the client adds to the sums over all clients of the round. If the reply is
    rejected, ``metrics`` and ``sums`` are empty.
    """

    n: int  # number of training examples
    class_counts: Sequence[int]  # training examples per class; empty if labels are no classes
    down_bytes: int
    up_bytes: int
    metrics: Mapping[str, float | Tensor]
    sums: Mapping[str, Flat | Tensor]
    rejected: str | None  # why the server rejects the reply; None: the reply is accepted

    def __str__(self) -> str:
        counts = ", ".join(f"{label}: {n}" for label, n in enumerate(self.class_counts) if n)
        of_classes = f" (of class {counts})" if counts else ""
        return "\n".join(
            [
                f"examples: {self.n}{of_classes}",
                f"message: {self.down_bytes} bytes down, {self.up_bytes} bytes up",
                *(f"{name}: {float(value):.9g}" for name, value in self.metrics.items()),
                *(f"norm of {name}: {float(data(x).norm()):.9g}" for name, x in self.sums.items()),
                f"reply: {f'rejected, {self.rejected}' if self.rejected else 'accepted'}",
            ]
        )


@fresh_torch()
def replay(
    folder: Path, number: int, client: int, say: Callable[[str], None] = print, named: Collection[str] = ()
) -> Replayed:
    """Train client ``client`` as in round ``number`` of the run in ``folder``.

    named: names of the user-defined components that may be executed, and the data folder that may be read. Code and
    folders that only the run's files name are not executed or read. Nothing is downloaded.

    Raises:
        UserError: there is no such run or round, the client does not train in it, or its training data are missing or
            have changed.
        ClientError: the client fails; the cause is the client's exception.
    """
    config = _config(folder)
    _require_within("--round", number, 1, planned_rounds(folder))
    _require_named(own_options(config), named)
    spec = build(config)
    require_same_data(folder, spec.names["data"], spec.dataset.digest)
    _require_within("--client", client, 0, len(spec.partition.rows) - 1)
    # The salt is read first, so that a lost salt is reported instead of missing images.
    salt = run_salts.read_salt(folder, spec.salts) if spec.is_secret else b""
    try:
        images = synthetic_images(spec, Store(spec.artifacts, say), (), say)
    except LookupError as error:
        raise UserError(f"--replay: training data of the run are missing; {error}.") from error
    ready = assemble(spec, images).keyed(salt)
    if not isinstance(ready.algorithm, ChoosesClients):  # sampling needs no state, so check before repeating rounds
        _require_training(ready, {}, number, client)
    executor = ready.executor(salt)
    run = run_name(spec.noise_key, spec.dataset.digest, salt)
    memory = ClientMemory(folder=folder / "memory", run=run)  # all states stay in RAM: no file is written
    before = _standing_before(number, ready, executor, memory, say)
    _require_training(ready, before.state, number, client)
    called = rounds.call(ready.algorithm, ready.plan, before, number)
    task = next(task for block in called.blocks for task in block if task.client == client)
    share = task.share
    partly = "" if share == 1 else f", a straggler with {100 * share:.3g} % of its local work"
    say(f"client {client}, round {number}, {called.task.algorithm}{partly}")
    (result,) = executor.map(train_block, replace(called.task, singly=False), [[task]])
    labels = ready.data.clients[client].y
    return Replayed(
        len(labels),
        [] if not ready.data.n_classes or labels.is_floating_point() else torch.bincount(labels).tolist(),
        called.task.nbytes + nbytes(task.individual),
        result.up_bytes,
        {name: value for _, reply in result.replies.values() for name, value in reply.metrics.items()},
        add_blocks(list(result.sums.values())),
        result.rejected.get(client),
    )


def _config(folder: Path) -> Experiment:
    """Return the run's config, changed so that it runs in this process and downloads nothing."""
    if not (folder / "config.yaml").exists():
        raise UserError(f"--replay: {folder} holds no run (it has no config.yaml).")
    return override(read_config(folder), {"federation.executor": "serial", "data.download": False})


def _require_named(options: Sequence[str], named: Collection[str]) -> None:
    """Check that ``named`` contains each user-defined component and data folder in ``options``."""
    unnamed = [option for option in options if shlex.split(option)[-1] not in named]
    if unnamed:
        raise UserError(f"--replay: the run names code or data of the user; to use them, add {' '.join(unnamed)}.")


def _require_within(option: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        raise UserError(f"{option} must lie in [{low}, {high}] in this run, got {value}.")


def _require_training(ready: Assembled, state: State, number: int, client: int) -> None:
    joined, present = rounds.answering(ready.algorithm, ready.plan, state, number)
    rule = ready.spec.names["straggler"]
    if client not in present:
        reason = f"its reply does not arrive (straggler.rule {rule})" if client in joined else "it was not sampled"
        some = ", ".join(map(str, present[:10])) + (f" and {len(present) - 10} more" if len(present) > 10 else "")
        raise UserError(f"client {client} does not train in round {number}: {reason}; these do: {some or 'none'}.")


def _standing_before(
    number: int, ready: Assembled, executor: Executor, memory: ClientMemory, say: Callable[[str], None]
) -> Standing:
    """Return the federation's state before round ``number``, computed from the nearest checkpoint or from round 0."""
    assert memory.folder is not None
    checkpoints = memory.folder.with_name("checkpoints")
    now = checkpoint.load_latest(checkpoints, memory, before=number, say=say) or ready.start(memory)
    missing = number - 1 - now.round
    if missing:
        say(f"There is no checkpoint after round {now.round}, so {missing} round(s) are run again first.")
    coming = rounds.run(ready.algorithm, executor, ready.plan, now)
    for _ in range(missing):
        now, _ = next(coming)
    return now
