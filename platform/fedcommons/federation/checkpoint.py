"""Where a federation stands, on disk: written atomically, verified when read, the last two kept."""

from pathlib import Path

from torch import Tensor

from fedcommons.accounting.communication import Traffic
from fedcommons.federation.rounds import Standing
from fedcommons.files import read_tensors, write_tensors
from fedcommons.tensors import Flat, Layout, Payload, data

KEEP = 2


def save(folder: Path, standing: Standing) -> None:
    """Write ``folder/round-000012.safetensors`` and its facts, and remove all but the last two."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors: dict[str, Tensor] = {}
    layouts: list[Layout] = []
    names: dict[str, int | None] = {}

    def put(prefix: str, payload: Payload) -> None:
        for name, x in payload.items():
            key = f"{prefix}/{name}"
            tensors[key] = data(x)
            names[key] = None
            if isinstance(x, Flat):
                if x.layout not in layouts:
                    layouts.append(x.layout)
                names[key] = layouts.index(x.layout)

    put("state", standing.state)
    for client, payload in standing.memory.items():
        put(f"memory/{client}", payload)
    t = standing.traffic
    facts = {
        "round": standing.round,
        "traffic": [t.down, t.up, t.once],
        "layouts": [[list(x.names), [list(s) for s in x.shapes]] for x in layouts],
        "tensors": names,
    }
    write_tensors(folder / f"round-{standing.round:06d}.safetensors", tensors, facts)
    for old in sorted(folder.glob("round-*.safetensors"))[:-KEEP]:
        old.unlink()
        old.with_name(old.name + ".json").unlink(missing_ok=True)


def load_latest(folder: Path) -> Standing | None:
    """The newest checkpoint that is intact, or None."""
    for path in sorted(folder.glob("round-*.safetensors"), reverse=True):
        try:
            found = read_tensors(path)
        except ValueError:
            continue  # cut off while it was written; the one before it is whole
        if found:
            return _standing(*found)
    return None


def _standing(tensors: dict[str, Tensor], facts: dict) -> Standing:
    layouts = [Layout(tuple(names), tuple(tuple(s) for s in shapes)) for names, shapes in facts["layouts"]]
    state: dict[str, Flat | Tensor] = {}
    memory: dict[int, dict[str, Flat | Tensor]] = {}
    for key, index in facts["tensors"].items():
        value = tensors[key] if index is None else Flat(layouts[index], tensors[key])
        kind, *rest = key.split("/")
        if kind == "state":
            state["/".join(rest)] = value
        else:
            memory.setdefault(int(rest[0]), {})["/".join(rest[1:])] = value
    return Standing(facts["round"], state, memory, Traffic(*facts["traffic"]))
