"""What command lines say, through the scripts themselves: wrong ones word for word, and right ones that look odd.

``refusals.json``: argv and all of stderr. ``accepted.json``: argv and what it means. ``{...}`` in a word stands for a
value of ``WORDS``. Who makes a sentence better changes it there too.
"""

import json
import re
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

from fedcommons.config import cli, presets
from papers.fedssyn import authors

HERE = Path(__file__).parent
REFUSALS = json.loads((HERE / "refusals.json").read_text())
ACCEPTED = json.loads((HERE / "accepted.json").read_text())
WORDS = {
    "{long}": "x" * 5000, "{digits}": "9" * 4000, "{deep}": "[" * 1000, "{name300}": "x" * 300, "{nul}": "\0",
    "{escape}": "\x1b[31m", "{newline}": "\n", "{surrogate}": "\udc80",
}  # fmt: skip
"""Besides, ``{tmp}`` is the folder in which the commands are given."""
MY_LAB = '''
from torch import nn


class Small(nn.Module):
    """A network.

    Args:
        width: outputs of the hidden layer
    """

    def __init__(self, shape, n_classes, width: int = 8):
        super().__init__()
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(64, width), nn.Linear(width, n_classes))

    def forward(self, x):
        return self.body(x)


class Client:
    def __init__(self, lr: float = 0.5):
        pass


def greedy(labels, n_clients, wanted):
    return []


broken = 3
'''
FILES: dict[str, str | bytes] = {
    "good.yaml": "seed: 4\nclient: {lr: 0.1}\n",
    "dup.yaml": "seed: 1\nseed: 2\n",
    "twice.yaml": "partition: {alpha: 1}\npartition.alpha: 2\n",
    "list.yaml": "- seed: 1\n",
    "empty.yaml": "",
    "two.yaml": "seed: 1\n---\nseed: 2\n",
    "open.yaml": "client: {lr: 0.1\n",
    "tab.yaml": "client:\n\tlr: 0.1\n",
    "bytes.yaml": bytes(range(128, 160)),
    "nul.yaml": b"seed: 1\x00\n",
    "deep.yaml": "[" * 1000,
    "nested.yaml": "partition: {alpha: {x: 1}}\n",
    "section.yaml": "partitions:\n  alpha: 0.1\n",
    "number.yaml": "1: 2\n",
    "pair.yaml": "[a, b]: 2\n",
    "members.yaml": "algorithm: [fedavg, fedprox]\n",
    "seeds.yaml": "seed: [1, 2]\n",
    "time.yaml": "client: {epochs: 1:30}\n",
    "octal.yaml": "seed: 0o17\n",
    "null.yaml": "out: null\n",
    "tilde.yaml": "algorithm: ~\n",
    "nothing.yaml": "seed:\n",
    "yes.yaml": "resume: yes\n",
    "flag.yaml": "resume: maybe\n",
    "help.yaml": "help: true\n",
    "print.yaml": "print_config: true\n",
    "config.yaml": "config: good.yaml\n",
    "tag.yaml": "seed: !!python/object/apply:os.system ['true']\n",
    "circle.yaml": "seed: &a [*a]\n",
    "merge.yaml": "a: &a {lr: 0.1}\nclient: {<<: *a}\n",
    "escape.yaml": 'algorithm: "\\e[31m"\n',
    "lines.yaml": 'tracking: {group: "a\\nb"}\n',
    "long.yaml": "tracking: {group: " + "x" * 5000 + "}\n",
    "large.yaml": "# " + "x" * 1_000_000 + "\nseed: 1\n",
    "other.yaml": "feddyn: {alpha: 0.1}\n",
    "word.yaml": "client: {lr: fast}\n",
    "bool.yaml": "dp: {local: sometimes}\n",
    "crlf.yaml": b"seed: 4\r\nclient:\r\n  lr: fast\r\n",
    "bom.yaml": b"\xef\xbb\xbfclient: {lr: fast}\n",
    "my_lab.py": MY_LAB,
    "bad.py": "1 / 0\n",
    "lacking.py": "import no_such_package_of_mine\n\n\nclass Net:\n    pass\n",
    "space.yaml": "space: [alpha=0.1, lr=fast]\n",
    "space_map.yaml": "space: {alpha: [0.1, 1]}\n",
    "space_bad.yaml": "space: alpha\n",
    "preset.yaml": "preset: big\n",
    "date.yaml": "seed: 2020-01-01\n",
    "inf.yaml": "client: {lr: .inf}\n",
    "hexa.yaml": "seed: 0x10\n",
    "empty_name.yaml": "'': 1\n",
    "list_of_lists.yaml": "model: {channels: [[8, 16]]}\n",
    "spaces.yaml": "' seed ': 1\n",
    "cr.yaml": "seed: 1\rclient:\r  lr: fast\r",
    "binary.yaml": "seed: !!binary aGk=\n",
    "set.yaml": "seed: !!set {a, b}\n",
    "replay.yaml": "replay: nowhere\nround: 1\n",
    "sections.yaml": "preset: smoke\np: .5\nsharing: shuffled_synthetic\nclient:\n  lr: 1e-2\nddpm: {epochs: 7}\n",
    "short_names.yaml": "alpha: 0.3\np: 0.2\nsharing: local_synthetic\nmodel: linear\ndata-dir: somewhere\n",
    "anchors.yaml": "federation: {rounds: &r 7, checkpoint_every: *r}\n",
    "marked.yaml": b"\xef\xbb\xbfseed: 4\r\nclient:\r\n  lr: 0.1\r\ndata: {dir: }\r\n",
    "empty_sections.yaml": "feddyn: {}\ngenerator: {}\nseed: 5\n",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which the commands are given, with ``FILES``."""
    here = tmp_path_factory.mktemp("commands").resolve()
    for name, content in FILES.items():
        (here / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    (here / "folder").mkdir()
    (here / "loop").symlink_to("loop")
    return here


@pytest.fixture(scope="module")
def script(sweeps: Callable[[str], ModuleType]) -> Callable[[str], ModuleType]:
    """The scripts, each loaded once."""
    return cache(sweeps)


@pytest.fixture
def there(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """As if a command were given in that folder: nothing of ours is left in this process."""
    before, handler = {path.name for path in folder.iterdir()}, signal.getsignal(signal.SIGTERM)
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(str(folder))
    yield folder
    signal.signal(signal.SIGTERM, handler)
    assert {path.name for path in folder.iterdir()} == before  # nothing was written


def words(argv: Sequence[str], folder: Path) -> list[str]:
    """The words that are meant."""
    for name, word in {**WORDS, "{tmp}": str(folder)}.items():
        argv = [text.replace(name, word) for text in argv]
    return list(argv)


def told(one: dict[str, Any]) -> str:
    """A name for a line of a table."""
    return " ".join([one["script"], *one["argv"]]).encode("unicode_escape").decode()


@pytest.mark.parametrize("one", REFUSALS, ids=told)
def test_a_wrong_command_line_is_refused_word_for_word(
    script: Callable[[str], ModuleType], there: Path, one: dict[str, Any], monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setattr(sys, "argv", [f"{one['script']}.py", *words(one["argv"], there)])
    with pytest.raises(SystemExit) as ended:
        cli.main(getattr(script(one["script"]), one["script"]))
    said = capsys.readouterr().err.replace(str(there), "{tmp}").splitlines()
    assert (said, ended.value.code) == ([one["said"]], one["code"])


def test_every_script_and_every_file_is_in_the_table() -> None:
    assert {one["script"] for one in REFUSALS} == {path.stem for path in (HERE.parent / "sweeps").glob("*.py")}
    argv = [word for one in (*REFUSALS, *ACCEPTED["lines"]) for word in one["argv"]]
    assert [name for name in FILES if not any(name in word for word in argv)] == []
    assert len({told(one) for one in REFUSALS}) == len(REFUSALS) >= 200


def fields(argv: Sequence[str]) -> dict[str, Any]:
    """The fields of the experiment that ``run.py`` would run."""
    defaults = presets.preset(cli.early(argv, "preset", "small"), cli.early(argv, "data.name", "digits"))
    parser = cli.parser("a test", argv, defaults)
    parser.add_argument("--preset", type=str, default="small")
    parser.add_argument("--resume", action="store_true")
    options = cli.parse(parser, argv)
    return dict(authors.settled(options.preset, cli.experiment(options), options.asked).flat)


@pytest.mark.parametrize("one", ACCEPTED["lines"], ids=told)
def test_a_right_command_line_means_what_it_meant(
    script: Callable[[str], ModuleType], there: Path, one: dict[str, Any]
) -> None:
    """fields: those that are not as in the first line's; without: those that are not there; cells: names of runs."""
    argv = words(one["argv"], there)
    if "cells" in one:
        module = script(one["script"])
        found = module.arguments(argv)
        cells = module.cells(found)[0] if one["script"] == "tune" else module.grid(found)
        assert [cell.name for cell in cells] == one["cells"]
        return
    found, plain = fields(argv), {} if not argv else ACCEPTED["lines"][0]["fields"]
    now = json.loads(json.dumps(found))
    changed = {name: value for name, value in now.items() if name not in plain or repr(plain[name]) != repr(value)}
    assert json.dumps(changed) == json.dumps(one["fields"])  # 1 is not 1.0 there
    assert [name for name in plain if name not in now] == one.get("without", [])


def printed(module: ModuleType, argv: Sequence[str], capsys: pytest.CaptureFixture[str]) -> str:
    """What a script prints before it stops."""
    with pytest.raises(SystemExit) as ended:
        getattr(module, module.__name__)(argv)
    assert not ended.value.code
    return capsys.readouterr().out


@pytest.mark.parametrize("one", ACCEPTED["printed"], ids=told)
def test_a_printed_config_is_what_it_was(
    script: Callable[[str], ModuleType], there: Path, one: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    text = printed(script(one["script"]), words(one["argv"], there), capsys)
    assert json.dumps(yaml.safe_load(text)) == json.dumps(one["config"])


@pytest.mark.parametrize("one", ACCEPTED["help"], ids=told)
def test_help_tells_every_option_and_its_default(
    script: Callable[[str], ModuleType], there: Path, one: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    assert defaults(printed(script(one["script"]), one["argv"], capsys)) == one["defaults"]


def defaults(text: str) -> dict[str, str]:
    """Each option of a help text and the last default that its entry tells, however the lines are wrapped.

    An entry begins at a line whose first word is an option and that is hardly indented, after the usage.
    """
    _, _, listed = text.partition("\noptions:\n")
    found: dict[str, str] = {}
    for entry in re.split(r"^ {0,4}(?=-)", re.split(r"\n\n(?=\S)", listed)[0], flags=re.M)[1:]:
        joined = re.sub(r"(?<=[a-z\d],)\s+", "", " ".join(entry.split()))  # of a list, wherever its line was broken
        name = re.search(r"--[\w.-]+", joined)
        if name:
            _, _, last = joined.rpartition("default: ")
            found[name[0]] = re.sub(r"\s", "", last.removesuffix(")")) if "default: " in joined else ""
    return found
