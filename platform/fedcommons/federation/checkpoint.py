"""Checkpoints of a federation, which are written atomically and verified when read. The last two stay on disk.

A checkpoint is a file of tensors with a JSON file of plain values (facts). Client memory is what a client stores from
round to round; it may be in separate files, which a checkpoint only names.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import astuple
from pathlib import Path
from typing import Any

from fedcommons.core import rejections
from fedcommons.core.communication import Traffic
from fedcommons.core.worker import give_back_freed
from fedcommons.errors import ClientError
from fedcommons.federation.client_memory import ClientMemory, remove, remove_files
from fedcommons.federation.rounds import Standing
from fedcommons.federation.serialization import pack, unpack
from fedcommons.flat_tensors import Layout, Payload, flat
from fedcommons.privacy import ledger as privacy
from fedcommons.storage import safe_read
from fedcommons.storage.atomic_files import read_tensors, write_tensors
from fedcommons.storage.paths import CHECKPOINT_FILE, MEMORY_FILE
from fedcommons.storage.safe_read import UnreadableError

KEEP = 2


def save(folder: Path, standing: Standing, record: str = "") -> None:
    """Write the state after a round to ``folder/round-NNNNNN.safetensors``; remove all but the last two checkpoints.

    record: a hash of the lines that the run has written to its record files up to this round.

    Client memories that are already in files are named in the checkpoint and not copied. Memory files that no
    checkpoint names are removed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    memory = standing.memory
    payloads = {"state": standing.state, "module": {"buffers": standing.buffers}}
    payloads |= {f"memory {client}": payload for client, payload in memory.in_ram.items()}
    tensors, facts = pack(payloads)
    facts |= {name: value for name, value in (("run", memory.run), ("record", record)) if value}
    facts |= {"round": standing.round, "traffic": astuple(standing.traffic), "order": list(memory)}
    facts["files"] = {str(client): name for client, name in memory.in_files.items()}
    facts["rejected"] = rejections.records(standing.rejected)
    facts["ledger"] = standing.ledger.record()
    facts |= {} if standing.clip is None else {"clip": standing.clip}
    facts["largest"] = astuple(standing.largest) if standing.largest else None
    write_tensors(folder / f"round-{standing.round:06d}.safetensors", tensors, facts)
    prune(folder, memory)
    give_back_freed()  # writing has created and freed a copy of each tensor


def prune(folder: Path, memory: ClientMemory) -> None:
    """Remove all but the last two checkpoints. Keep only memory files that a kept checkpoint or ``memory`` names."""
    checkpoints = _checkpoints(folder)
    for number in sorted(checkpoints)[:-KEEP]:
        remove(checkpoints.pop(number))
    if memory.folder is not None:
        needed = {name for path in checkpoints.values() for name in _files(path)}
        remove_files(memory.folder, needed | set(memory.in_files.values()))


def remove_after(folder: Path, round: int) -> None:
    """Remove the checkpoints of rounds after ``round``, because the engine will run those rounds again."""
    for number, path in _checkpoints(folder).items():
        if number > round:
            remove(path)


def _checkpoints(folder: Path) -> dict[int, Path]:
    """Return round -> checkpoint file for all checkpoints in the folder."""
    matches = {path: re.fullmatch(CHECKPOINT_FILE, path.name) for path in folder.glob("round-*.safetensors")}
    return {int(match[1]): path for path, match in matches.items() if match}


def _files(checkpoint: Path) -> set[str]:
    try:
        return set(safe_read.json_of(checkpoint.with_name(checkpoint.name + ".json"), inner=2)["files"].values())
    except (ValueError, KeyError, TypeError, AttributeError):
        return set()  # the checkpoint is incomplete or damaged, so it will never be loaded


def load_latest(
    folder: Path,
    memory: ClientMemory | None = None,
    before: int | None = None,
    model: Layout | None = None,
    record: Callable[[int], str] | None = None,
    say: Callable[[str], None] = print,
) -> Standing | None:
    """Return the federation's state from the run's newest intact checkpoint, or None if there is none.

    Args:
        memory: a client memory with the run's identifier and the folder of memory files, which are verified too.
        before: consider only checkpoints of rounds before this round; None: all.
        model: names and shapes that the server model must have; None: any, or no server model.
        record: function that returns the hash of the run's record files up to a round; None: not checked.
        say: called with a message about each skipped checkpoint, and about a checkpoint that does not name its run.
    """
    memory = ClientMemory() if memory is None else memory
    for number, path in sorted(_checkpoints(folder).items(), reverse=True):
        if before is not None and number >= before:
            continue
        try:
            content = read_tensors(path, inner=2)
            facts = content[1] if content else {}
            expected_record = record(number) if record and "record" in facts else None
            if flaw := _flaw(facts, memory.run, expected_record):
                say(f"{path} {flaw}, so it is skipped.")
                continue
            standing = _standing(unpack(*content), facts, memory) if content else None
        except UnreadableError as error:
            say(f"{error}, so it is skipped.")
            continue
        except (ValueError, ClientError):
            continue  # this checkpoint is incomplete or damaged; the previous checkpoint is intact
        if standing and standing.round == number and model in (None, standing.layout):
            if memory.run and "run" not in facts:
                say(f"{path} is of an earlier version and does not name its run; it is used for this run.")
            return standing
    return None


def _flaw(facts: Mapping[str, Any], run: str, record: str | None) -> str | None:
    """Return the reason why a checkpoint with these facts must be skipped, or None. Missing facts are not checked.

    run: identifier that the checkpoint must have. record: required hash of the run's record files; None: any.
    """
    if run and facts.get("run", run) != run:
        return "is of a run with other fields, data, code or secret noise"
    if record and facts.get("record", record) != record:
        return "belongs to other rounds than those in rounds.jsonl and clients.jsonl"
    return None


def _standing(payloads: dict[str, Payload], facts: dict[str, Any], memory: ClientMemory) -> Standing:
    """Return the state of the federation that a checkpoint contains.

    Raises:
        ValueError: the facts do not have the form that ``save`` writes.
        ClientError: a memory in a file cannot be read.
    """
    try:
        entries = {int(k.removeprefix("memory ")): p for k, p in payloads.items() if k.startswith("memory ")}
        entries |= {int(client): name for client, name in facts["files"].items()}
        ordered = {client: entries[client] for client in facts["order"]}
        # Checkpoints of earlier versions lack the lost bytes, ``rejected`` and ``largest``, so defaults replace them.
        traffic = Traffic(*facts["traffic"])
        buffers = flat(payloads["module"], "buffers")
        state = payloads["state"]
        if "model" in state:
            flat(state, "model")
        rejected = rejections.read(facts.get("rejected", []))
        largest = rejections.read_largest(facts.get("largest"))
        clip = None if "clip" not in facts else float(facts["clip"])
        ledger = privacy.read(facts["ledger"])  # a checkpoint without the privacy ledger is damaged
    except (KeyError, TypeError, AttributeError) as error:  # raised for JSON of another form
        raise ValueError(f"the facts are not those of a checkpoint: {error!r}") from error
    names = facts["files"].values()
    if len(facts["order"]) != len(entries) or not all(re.fullmatch(MEMORY_FILE, str(name)) for name in names):
        raise ValueError("the facts name other memories than the checkpoint has")
    if len(facts["traffic"]) < 3 or not all(type(n) is int and n >= 0 for n in (facts.get("round"), *astuple(traffic))):
        raise ValueError("the numbers of rounds and bytes in the facts must be whole numbers, 0 or more")
    return Standing(
        facts["round"], state, memory.restored(ordered), traffic=traffic, buffers=buffers, rejected=rejected,
        largest=largest, ledger=ledger, clip=clip,
    )  # fmt: skip
