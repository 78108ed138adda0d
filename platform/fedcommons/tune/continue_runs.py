"""Cells of a sweep that go on from a shorter run in its folder: the same experiment, planned with fewer rounds.

A cell's name is a hash of its fields, so a cell with more rounds has another folder. It begins with a copy of the run
that was shorter, which stays as it is.
"""

import shutil
from collections.abc import Sequence
from pathlib import Path

from fedcommons.config import dotted
from fedcommons.config.experiment import Experiment
from fedcommons.errors import UserError
from fedcommons.storage.artifact_store import key_of
from fedcommons.tracking.run_folder import is_run, read_config, read_rounds, require_plain

_COPIED = ("environment.json", "config.yaml", "noise.json", "partition.json", "rounds.jsonl", "timing.jsonl",
           "clients.jsonl", "best*.safetensors", "memory/*.safetensors*", "checkpoints/*.safetensors*")  # fmt: skip
"""In this order: the first two make it a run folder, and a checkpoint names files of memory. No W&B run is copied."""


def predecessors(out: Path, wanted: Sequence[tuple[str, Experiment]]) -> dict[str, Path]:
    """For each of these cells (its folder's name, its experiment) the run in ``out`` that it can go on from, if any.

    That is the one that has played the most rounds, of those with the same fields but for a smaller number of rounds.
    """
    new = [(name, config) for name, config in wanted if not is_run(out / name)]
    shorter: dict[str, list[tuple[int, int, Path]]] = {}
    for path in sorted(path.parent for path in out.glob("*/config.yaml")) if new else ():
        try:
            config, done = read_config(path), len(read_rounds(path)) - 1
        except UserError:
            continue  # damaged, or of another version
        if done > 0:
            shorter.setdefault(_key(config), []).append((done, config.federation.rounds, path))
    found: dict[str, Path] = {}
    for name, config in new:
        rounds = config.federation.rounds
        if some := [(done, path) for done, planned, path in shorter.get(_key(config), ()) if planned < rounds]:
            found[name] = max(some)[1]
    return found


def _key(config: Experiment) -> str:
    """What decides the rounds of a run."""
    return key_of({name: value for name, value in dotted.deciding(config).items() if name != "federation.rounds"})


def copy(run: Path, to: Path) -> None:
    """Copy a run into a new folder, where ``experiment.run`` goes on from it.

    If this process is killed meanwhile, the run goes on from what is there: a round whose lines or checkpoint are not
    whole is played again.

    Raises:
        UserError: a file of it is a link to elsewhere.
    """
    require_plain(run)
    for pattern in _COPIED:
        for path in sorted(run.glob(pattern)):
            new = to / path.relative_to(run)
            new.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, new)
