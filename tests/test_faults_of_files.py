"""Folders of runs whose files are damaged at random: what reads them does its work or ends with one sentence."""

import json
import shutil
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from forked import SIZES, SMALL, VALUES, Script, call, camp, examine, forked, ran, warm_up, words, write_mine
from hypothesis import strategies as st

RUNS = {
    "plain": {"federation.rounds": "3"},
    "memory": {"algorithm": "scaffold", "federation.memory_mb": "0.001", "federation.checkpoint_every": "1"},
    "pool": {"sharing.setting": "shuffled_synthetic", "sharing.p": "0.5", "generator.epochs": "1",
             "generator.channels": "[8,8]", "generator.sampling_steps": "2"},
}  # fmt: skip


@pytest.fixture(scope="module")
def scripts(sweeps: Callable[[str], ModuleType]) -> dict[str, Script]:
    warm_up()
    return {name: vars(sweeps(name))[name] for name in ("run", "compare")}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory, scripts: dict[str, Script]) -> Path:
    """A folder with each run, and the store beside it."""
    folder = tmp_path_factory.mktemp("files")
    for kind, fields in RUNS.items():
        (folder / "whole" / kind).mkdir(parents=True)
        asked = words({**SMALL, **fields})
        ended = forked(lambda asked=asked: call(scripts["run"], *asked), folder / "whole" / kind)
        assert ended.code == 0, ended.err
    return folder


MINE = ("notes.txt", "out/checkpoints/mine.txt")
BYTES = ("cut", "emptied", "flipped", "inserted", "doubled", "zeros")


@dataclass(frozen=True)
class Damage:
    """which: the number of a file, over all files. at: where in it, as a share of its length."""

    which: int
    way: str
    at: float
    content: bytes
    value: Any


DAMAGES = st.builds(
    Damage,
    st.integers(0, 200),
    st.sampled_from([*BYTES, "removed", *["value"] * 6, *["line"] * 3]),
    st.floats(0, 1),
    st.binary(min_size=1, max_size=6),
    VALUES,
)


def altered(value: Any, at: float, new: Any) -> Any:
    """The value with another one in one place."""
    if isinstance(value, dict) and value:
        name = sorted(value)[int(at * (len(value) - 1))]
        return {**value, name: altered(value[name], (at * 7) % 1, new) if at < 0.7 else new}
    return new


def damage(path: Path, one: Damage) -> None:
    """Damage a file in one of the ways; of JSON, one of its values."""
    content = path.read_bytes()
    i = int(one.at * len(content))
    if one.way == "removed":
        path.unlink()
    elif one.way == "value" and path.suffix in (".json", ".lock"):
        path.write_text(json.dumps(altered(json.loads(content), one.at, one.value)), encoding="utf-8")
    elif one.way in ("value", "line") and path.suffix == ".jsonl":
        lines = content.splitlines() or [b"{}"]
        j = int(one.at * (len(lines) - 1))
        value = json.dumps(altered(json.loads(lines[j]), one.at, one.value)).encode()
        lines[j] = value if one.way == "value" else one.content
        path.write_bytes(b"\n".join(lines) + b"\n")
    else:
        changed = {
            "cut": content[:i], "emptied": b"", "doubled": content * 2, "zeros": b"\0" * len(content),
            "flipped": content[:i] + bytes(b ^ 0xFF for b in content[i : i + 1]) + content[i + 1 :],
        }.get(one.way, content[:i] + one.content + content[i:])  # fmt: skip
        path.write_bytes(changed)


Case = tuple[str, str, bool, list[Damage]]
CASES: st.SearchStrategy[Case] = st.tuples(
    st.sampled_from(sorted(RUNS)),
    st.sampled_from(["resume", "resume", "anew", "replay", "frames", "compare"]),
    st.booleans(),
    st.lists(DAMAGES, min_size=1, max_size=2),
)


def frames(_: object) -> int:
    import fedcommons as fc

    runs, rounds, clients = fc.load_runs("."), fc.load_rounds("."), fc.load_clients(".")
    print(ascii(runs.to_csv()), len(rounds), len(clients))
    return 0


def check(case: Case, scripts: dict[str, Script], root: Path) -> None:
    kind, reader, is_finished, damages = case
    whole, names = root / "whole" / kind, list[str]()
    with camp(root) as here:
        shutil.copytree(whole, here, dirs_exist_ok=True)
        shutil.copytree(root / "whole" / "plain" / "out", here / "good")
        write_mine(here, *MINE)
        if not is_finished:
            (here / "out" / "summary.json").unlink()
        for one in damages:
            able = sorted(p for p in [*here.glob("out/**/*"), *here.glob("store/**/*")] if p.is_file())
            able.remove(here / MINE[1])
            path = able[one.which % len(able)]
            with suppress(ValueError, TypeError):  # it was damaged before
                damage(path, one)
            names.append(path.name)
        fields = {**SMALL, **RUNS[kind]}
        actions = {
            "resume": lambda: call(scripts["run"], *words(fields), "--resume"),
            "anew": lambda: call(scripts["run"], "--config=out/config.yaml", "--out=anew"),
            "replay": lambda: call(scripts["run"], "--replay=out", "--round=2", "--client=1"),
            "compare": lambda: call(scripts["compare"], "out", "good", "--x=client.lr", "--out=table"),
            "frames": lambda: call(frames),
        }
        ended = ran(here, actions[reader])
        assert [(here / name).read_text() for name in MINE] == [f"mine: {name}" for name in MINE]
        if ended.code == 0 and reader == "resume":
            rounds = [json.loads(text)["round"] for text in (here / "out" / "rounds.jsonl").read_text().splitlines()]
            assert rounds == list(range(int(fields["federation.rounds"]) + 1))
            if all(".safetensors" in name for name in names):
                for name in ("rounds.jsonl", "summary.json"):
                    assert (here / "out" / name).read_bytes() == (whole / "out" / name).read_bytes()


@SIZES
def test_a_damaged_folder_is_read_or_refused(many: bool, scripts: dict[str, Script], root: Path) -> None:
    examine(lambda case: check(case, scripts, root), CASES, 12, many)
