"""Files that somebody else may have made: what is read of them, and what is shown."""

import os
import re
from pathlib import Path

import pytest

from fedcommons.config import cli, presets
from fedcommons.config.experiment import Experiment
from fedcommons.config.flat import override
from fedcommons.errors import UserError
from fedcommons.files import stored, write_text
from fedcommons.locks import holder
from fedcommons.runs.replay import replay
from fedcommons.tracking.run_folder import RunFolder, read_config

BOMB = "a: &a [x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"{b}: &{b} [{','.join([f'*{a}'] * 9)}]\n" for a, b in zip("abcdefgh", "bcdefghi", strict=True)
)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (BOMB, "aliases"), ("seed: &s 3\ntarget: *s\n", "aliases"),
        ("a: " + "[" * 300_000, "nested too deeply|nesting depth"),  # ours, and PyYAML's from 6.0.4
        ("a: [" + "1," * 200_000 + "1]", "100,000 values"), ("x" * 1_000_001, "at most 1,000,000"),
    ],
)  # fmt: skip
def test_a_runs_yaml_is_looked_through_before_it_is_made(text: str, why: str, tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(text)
    with pytest.raises(UserError, match=why):
        read_config(tmp_path)


@pytest.mark.parametrize(
    "text",
    ["a: &a [" + "1," * 999 + "1]\n" + "".join(f"b{i}: *a\n" for i in range(200)), "a: [" + "1," * 200_000 + "1]"],
    ids=["aliases", "a long list"],
)
def test_a_config_file_of_ones_own_may_have_so_many_values(text: str, tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(text)
    with pytest.raises(UserError, match=r"mine\.yaml has more than 100,000 values"):
        cli.read([f"--config={tmp_path / 'mine.yaml'}"])


@pytest.mark.parametrize("text", ['{"pid": 1e999, "host": "x"}', '{"pid": "1", "host": "x"}', '{"pid": 1, "host": 2}'])
def test_a_lock_that_nobody_of_ours_wrote_names_nobody(text: str, tmp_path: Path) -> None:
    (tmp_path / ".lock").write_text(text)
    assert holder(tmp_path) is None


def test_a_message_is_not_written_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("mine")
    (tmp_path / "link").symlink_to("mine")
    (tmp_path / "second").hardlink_to(tmp_path / "mine")
    os.mkfifo(tmp_path / "pipe")
    for name in ("link", "second", "pipe"):
        with pytest.raises(OSError, match=r"."):
            stored.write_alone(tmp_path / name, "more")
    stored.write_alone(tmp_path / "own", "one\n")
    stored.write_alone(tmp_path / "own", "two\n")
    assert (tmp_path / "mine").read_text() == "mine"
    assert (tmp_path / "own").read_text() == "one\ntwo\n"


def test_a_temporary_name_that_links_elsewhere_is_not_written_through(tmp_path: Path) -> None:
    (tmp_path / f".file.{os.getpid()}.tmp").symlink_to("elsewhere")
    write_text(tmp_path / "file", "text")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_folder_in_a_run_that_links_elsewhere_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "real" / "file").write_text("{}")
    (tmp_path / "linked").symlink_to("real")
    assert stored.json_of(tmp_path / "linked" / "file", inner=1) == {}  # a run folder may be a link
    with pytest.raises(stored.UnreadableError, match="linked is a link"):
        stored.json_of(tmp_path / "linked" / "file", inner=2)


def test_what_a_terminal_obeys_is_escaped() -> None:
    assert stored.clean("a\x1b[31m\u202e\ud800 \u00e9\n") == r"a\x1b[31m\u202e\ud800 é\n"
    assert str(UserError("\x1b[31mred.")) == r"\x1b[31mred."


def _written(folder: Path, **values: object) -> Experiment:
    """The folder of a run that has begun."""
    config = override(presets.experiment("smoke", "mnist"), {name.replace("__", "."): v for name, v in values.items()})
    RunFolder(folder, config, resume=False)
    return config


def test_a_replay_downloads_nothing_and_reads_no_folder_that_the_user_does_not_name(tmp_path: Path) -> None:
    wanted = tmp_path / "wanted"
    _written(tmp_path / "run", data__download=True, data__dir=str(wanted))
    with pytest.raises(UserError, match=re.escape(f"to have it read, add --data.dir {wanted}.")):
        replay(tmp_path / "run", 1, 0)
    with pytest.raises(UserError, match="is not there"):
        replay(tmp_path / "run", 1, 0, named=[str(wanted)])
    assert not wanted.exists()
