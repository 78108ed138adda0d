"""Hosts with other code, or without the folders of results, are refused by name."""

import json
import logging
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from fedcommons import Experiment, UserError, experiment
from fedcommons.cli.display import Display
from fedcommons.federation import hosts, source_files
from fedcommons.runs.experiment import run
from fedcommons.tune.sweep import Trial, todo

ROOT = Path(__file__).parents[2]
CHANGED = "platform/fedcommons/seeding.py"


def copied(to: Path) -> Path:
    """Copy what is hashed to a new clone without git."""
    for name in ("platform", "lightning_modules", "sweeps"):
        shutil.copytree(ROOT / name, to / name, ignore=shutil.ignore_patterns("__pycache__"))
    return to


def hashes_of(*path: Path) -> dict[str, str]:
    """Return the hashes in a process that has these folders first."""
    code = "import json; from fedcommons.federation import source_files as s; print(json.dumps(s.hashes()))"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, path))}
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.long
def test_a_copy_has_the_same_hashes_wherever_it_lies_and_other_ones_for_what_was_changed(tmp_path: Path) -> None:
    clone = copied(tmp_path / "clone")
    ours = source_files.hashes()
    some = {"sweeps/table1.py", "sweeps/papers/fedssyn/authors.py", "lightning_modules/vae.py", "torch"}
    assert {CHANGED, *some} <= {*ours}
    assert hashes_of(clone / "platform", clone) == ours
    wheel = tmp_path / "wheel"
    for old, new in {"platform/fedcommons": "fedcommons", "sweeps": "fedcommons_sweeps"}.items():
        shutil.copytree(clone / old, wheel / new)
    shutil.copytree(clone / "lightning_modules", wheel / "lightning_modules")
    assert hashes_of(wheel) == ours
    (wheel / "fedcommons" / "seeding.py").write_text("# other\n")
    (wheel / "fedcommons_sweeps" / "papers" / "agc" / "curves.py").unlink()
    (wheel / "lightning_modules" / "more.py").touch()
    theirs = hashes_of(wheel)
    different = {name for name in {*ours, *theirs} if ours.get(name) != theirs.get(name)}
    assert different == {CHANGED, "sweeps/papers/agc/curves.py", "lightning_modules/more.py"}


def test_what_differs_is_named_with_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    theirs, here = hosts.facts(), socket.gethostname()
    hosts.require_same(theirs)
    for change, names in (
        ({CHANGED: "0"}, [CHANGED]),
        ({"numpy": "0.1"}, ["numpy", "not 0.1"]),
        ({f"sweeps/{n}.py": "0" for n in range(9)}, ["sweeps/0.py", "sweeps/4.py", "4 more"]),
    ):
        for name, advice in ((here, "another checkout"), ("another", "ray rsync-up -A")):
            with pytest.raises(UserError) as refused:
                hosts.require_same({**theirs, "files": {**theirs["files"], **change}, "host": {"name": name}})
            assert all(word in str(refused.value) for word in [here, advice, *names])
    monkeypatch.setenv("MKL_CBWR", "COMPATIBLE")  # it rounds otherwise
    with pytest.raises(UserError, match=rf"host {here} .*MKL_CBWR is not set"):
        hosts.require_same(theirs)


def test_a_host_that_does_not_see_a_folder_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hosts, "LOOK_S", 0.0)
    (tmp_path / "seen").touch()
    seen, unseen = (("--out", str(tmp_path / "seen")), ("--artifacts", str(tmp_path / "unseen")))
    hosts.require_markers([seen], "")
    with pytest.raises(UserError, match=rf"^--artifacts: host {socket.gethostname()} .*{tmp_path} .*, or do without"):
        hosts.require_markers([seen, unseen], ", or do without")


def test_a_host_that_cannot_run_trials_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder that cannot be written, no login, and a full disk."""
    (tmp_path / "seen").touch()
    seen, here = [("--out", str(tmp_path / "seen"))], socket.gethostname()
    assert hosts.require_ready(seen, "", lambda: ("", False)) == []
    (message,) = hosts.require_ready(seen, "", lambda: ("the server does not answer", False))
    assert message.startswith(f"--wandb online: host {here}: the server does not answer")
    with pytest.raises(UserError, match=rf"^--out: host {here} cannot write /dev/null"):
        hosts.require_room([("--out", "/dev/null")])
    with pytest.raises(UserError, match=f"^--wandb online: host {here}: the key has expired"):
        hosts.require_ready(seen, "", lambda: ("the key has expired", True))
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=3 * 2**20))
    with pytest.raises(UserError, match=rf"^--out: the disk of host {here} is full: {tmp_path} has 3 MB free"):
        hosts.require_ready(seen, "", None)
    import ray

    monkeypatch.setattr(ray, "nodes", list)
    monkeypatch.setattr(ray, "get_runtime_context", lambda: SimpleNamespace(get_node_id=lambda: "here"))
    hosts.require_alike({}, [("--out", tmp_path)], "")  # one machine alone is not refused


def smoke() -> Experiment:
    values = {"data.limit": 80, "federation.rounds": 1, "measure.every": 0, "tracking.wandb": "off"}
    return experiment("smoke", "digits", values)


def test_a_host_with_other_data_is_named_and_writes_nothing(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=rf"host {socket.gethostname()} has other data: .* data\.name digits "):
        run(smoke(), tmp_path / "run", data="0" * 24)
    assert not (tmp_path / "run").exists()


@pytest.mark.long
def test_a_run_keeps_the_hash_of_its_source_files_and_warns_if_others_began_it(tmp_path: Path) -> None:
    reported: list[str] = []
    run(smoke(), tmp_path / "run", say=reported.append)
    file = tmp_path / "run" / "environment.json"
    assert json.loads(file.read_text())["code_hashes"] == [source_files.combined_hash()]
    assert not reported
    facts = json.loads(file.read_text()) | {"code_hashes": ["0123456789abcdef"]}
    (tmp_path / "run" / "summary.json").unlink()
    file.write_text(json.dumps(facts))
    cell = Trial("run", smoke())
    (handler := logging.Handler()).emit = lambda record: reported.append(record.getMessage())
    with Display(quiet=True, file=handler) as display:
        todo([cell, Trial("new", smoke())], tmp_path, display)
    assert [text for text in reported if "other source files" in text and "1 of 2 runs" in text]
    reported.clear()
    run(smoke(), tmp_path / "run", say=reported.append, resume=True)
    assert "other source files" in reported[0]
    assert json.loads(file.read_text())["code_hashes"] == ["0123456789abcdef", source_files.combined_hash()]
