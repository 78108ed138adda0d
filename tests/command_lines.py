"""Commands that are refused: the files of the folder in which they are given, and how they end."""

import shlex
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from fedcommons.config import cli

WORDS = {
    "{long}": "x" * 5000, "{digits}": "9" * 4000, "{name300}": "x" * 300, "{nul}": "\0",
    "{escape}": "\x1b[31m", "{surrogate}": "\udc80",
}  # fmt: skip
"""Placeholders in a command, besides ``{tmp}`` for the folder."""

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

'''
FILES: dict[str, str | bytes] = {
    "my_lab.py": MY_LAB,
    "bad.py": "1 / 0\n",
    "lacking.py": "import no_such_package_of_mine\n\n\nclass Net:\n    pass\n",
    "good.yaml": "seed: 4\nclient: {lr: 0.1}\n",
    "dup.yaml": "seed: 1\nseed: 2\n",
    "list.yaml": "- seed: 1\n",
    "tab.yaml": "client:\n\tlr: 0.1\n",
    "bytes.yaml": bytes(range(128, 160)),
    "deep.yaml": "[" * 1000,
    "nested.yaml": "partition: {alpha: {x: 1}}\n",
    "section.yaml": "partitions:\n  alpha: 0.1\n",
    "time.yaml": "client: {epochs: 1:30}\n",
    "yes.yaml": "resume: yes\n",
    "large.yaml": "# " + "x" * 1_000_000 + "\nseed: 1\n",
    "word.yaml": "client: {lr: fast}\n",
    "space.yaml": "space: [alpha=0.1, lr=fast]\n",
    "replay.yaml": "replay: nowhere\nround: 1\n",
}


LOADED: dict[str, ModuleType] = {}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of the commands, without links in its path."""
    path = tmp_path_factory.mktemp("commands")
    for name, content in FILES.items():
        (path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    (path / "folder").mkdir()
    (path / "loop").symlink_to("loop")
    return path.resolve()


@pytest.fixture
def refusal(
    folder: Path,
    sweeps: Callable[[str], ModuleType],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> Callable[[str], str]:
    """Give a command in the folder. Check that it exits with 2, prints one line and writes nothing; return the line."""

    def refused(line: str) -> str:
        name, *argv = shlex.split(line)
        for mark, word in {**WORDS, "{tmp}": str(folder)}.items():
            argv = [text.replace(mark, word) for text in argv]
        before, handler = sorted(folder.rglob("*")), signal.getsignal(signal.SIGTERM)
        monkeypatch.chdir(folder)
        monkeypatch.syspath_prepend(str(folder))
        monkeypatch.setattr(sys, "argv", [f"{name}.py", *argv])
        script = getattr(LOADED.setdefault(name, LOADED.get(name) or sweeps(name)), name)
        with pytest.raises(SystemExit) as ended:
            cli.main(script)
        signal.signal(signal.SIGTERM, handler)
        printed = capsys.readouterr().err.replace(str(folder), "{tmp}").splitlines()
        assert ended.value.code == 2, printed
        assert len(printed) == 1, printed
        assert printed[0].startswith("error: ")
        assert sorted(folder.rglob("*")) == before
        return printed[0].removeprefix("error: ")

    return refused
