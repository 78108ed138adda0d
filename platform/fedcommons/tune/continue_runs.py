"""Let a new trial of a sweep continue a shorter run (same experiment, fewer rounds) of the same sweep folder.

A trial's name contains a hash of its fields, so a trial with more rounds has another folder. The trial begins with a
copy of the shorter run, which is not changed.
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
           "clients.jsonl", "participants/*.json", "best*.safetensors", "memory/*.safetensors*",
           "checkpoints/*.safetensors*")  # fmt: skip
"""Files to copy, in this order: the first two make the folder a run folder, and a checkpoint names files in ``memory``.
The files of Weights & Biases are not copied."""


def predecessors(out: Path, wanted: Sequence[tuple[str, Experiment]]) -> dict[str, Path]:
    """Return the run in ``out`` that each new trial can continue, by trial name; trials without such a run are missing.

    Candidates are the runs with fewer planned rounds and the same values of all other fields that decide results. The
    candidate with the most finished rounds is returned. wanted: (trial name, experiment) of each trial.
    """
    new = [(name, config) for name, config in wanted if not is_run(out / name)]
    shorter: dict[str, list[tuple[int, int, Path]]] = {}
    for path in sorted(path.parent for path in out.glob("*/config.yaml")) if new else ():
        try:
            (planned, others), done = dotted.without_rounds(read_config(path)), len(read_rounds(path)) - 1
        except UserError:
            continue  # the run is damaged, or another version wrote it
        if done > 0:
            shorter.setdefault(key_of(others), []).append((done, planned, path))
    result: dict[str, Path] = {}
    for name, config in new if shorter else ():
        rounds, others = dotted.without_rounds(config)
        if some := [(done, path) for done, planned, path in shorter.get(key_of(others), ()) if planned < rounds]:
            result[name] = max(some)[1]
    return result


def copy(run: Path, to: Path) -> None:
    """Copy a run from the folder ``run`` into the new folder ``to``, where ``experiment.run`` continues the copy.

    If this process is killed during the copy, the run continues from the copied files. A round with incomplete lines
    or checkpoint runs again.

    Raises:
        UserError: a file of the run is a symbolic link, a pipe or a folder.
    """
    require_plain(run)
    for pattern in _COPIED:
        for path in sorted(run.glob(pattern)):
            new = to / path.relative_to(run)
            new.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, new)
