"""Where a federation stands, on disk: written atomically, verified when read, the last two kept."""

import json
from pathlib import Path

from fedcommons.accounting.communication import Traffic
from fedcommons.errors import ClientError
from fedcommons.federation.memory import ClientMemory, remove_files
from fedcommons.federation.packing import pack, unpack
from fedcommons.federation.rounds import Standing
from fedcommons.federation.worker import give_back_freed
from fedcommons.files import read_tensors, write_tensors
from fedcommons.tensors import flat

KEEP = 2


def save(folder: Path, standing: Standing) -> None:
    """Write ``folder/round-000012.safetensors`` and its facts, and remove all but the last two.

    Memories of clients that are in files already are named, not copied; files that nothing names are removed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    memory, t = standing.memory, standing.traffic
    payloads = {"state": standing.state, "module": {"buffers": standing.buffers}}
    payloads |= {f"memory {client}": payload for client, payload in memory.in_ram.items()}
    tensors, facts = pack(payloads)
    facts |= {"round": standing.round, "traffic": [t.down, t.up, t.once], "order": list(memory)}
    facts["files"] = {str(client): name for client, name in memory.in_files.items()}
    write_tensors(folder / f"round-{standing.round:06d}.safetensors", tensors, facts)
    kept = sorted(folder.glob("round-*.safetensors"))
    for old in kept[:-KEEP]:
        old.unlink()
        old.with_name(old.name + ".json").unlink(missing_ok=True)
    if memory.folder is not None:
        needed = {name for path in kept[-KEEP:] for name in _files(path)}
        remove_files(memory.folder, needed | set(memory.in_files.values()))
    give_back_freed()  # what was written was copied


def _files(checkpoint: Path) -> set[str]:
    try:
        return set(json.loads(checkpoint.with_name(checkpoint.name + ".json").read_text())["files"].values())
    except (OSError, ValueError, KeyError):
        return set()  # cut off while it was written: it will not be read


def load_latest(folder: Path, memory: ClientMemory | None = None, before: int | None = None) -> Standing | None:
    """The newest checkpoint (of a round before ``before``) that is intact, or None.

    ``memory``: where memories of clients in files are. They are verified too, all of them.
    """
    for path in sorted(folder.glob("round-*.safetensors"), reverse=True):
        if before is not None and path.name >= f"round-{before:06d}":
            continue
        try:
            found = read_tensors(path)
            if found:
                payloads, facts = unpack(*found), found[1]
                entries = {int(k.removeprefix("memory ")): p for k, p in payloads.items() if k.startswith("memory ")}
                entries |= {int(client): name for client, name in facts["files"].items()}
                ordered = {client: entries[client] for client in facts["order"]}
                restored = (ClientMemory() if memory is None else memory).restored(ordered)
                buffers = flat(payloads["module"], "buffers")
                return Standing(facts["round"], payloads["state"], restored, Traffic(*facts["traffic"]), buffers)
        except (ValueError, KeyError, ClientError):
            continue  # cut off while it was written, or damaged; the one before it is whole
    return None
