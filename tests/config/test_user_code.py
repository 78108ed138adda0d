"""A component's hash covers the user's modules that it imports, and a process runs the code that was hashed."""

import os
import sys
from hashlib import sha256
from pathlib import Path

import pytest

from fedcommons.config import registry
from fedcommons.config.dotted import choose
from fedcommons.errors import UserError
from fedcommons.runs import build
from fedcommons.runs.build import check

NET = """
from torch import nn


class Net(nn.Module):
    def __init__(self, shape, n_classes):
        super().__init__()
        self.body = nn.Linear(64, n_classes)

    def values():
        return ()
"""


class Lab:
    """A folder of user modules."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def write(self, name: str, text: str) -> None:
        """Write a file, always with the same time: a .pyc cannot be distinguished from a fresh one by it."""
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        os.utime(path, (1e9, 1e9))

    def net(self, name: str, imports: str = "", values: str = "()") -> None:
        """Write a component that imports; ``values``: the expression that ``Net.values`` returns."""
        self.write(name, f"{imports}\n{NET}".replace("return ()", f"return {values}"))

    def hash_of(self, name: str) -> str:
        return sha256((self.folder / name).read_bytes()).hexdigest()[:24]


@pytest.fixture
def lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Lab:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", False)  # as for a user, whatever the environment says
    return Lab(tmp_path)


def values(name: str) -> tuple:
    """Return what the component's code evaluates to after it was hashed."""
    registry.source(name)
    return registry.find("model", name).values()


def test_without_neighbours_the_hash_is_that_of_the_file(lab: Lab) -> None:
    lab.net("pkg/net.py", "import os, torch\nimport numpy as np\nimport yaml, statistics")
    for other in ("helper.py", "statistics.py", "yaml.py"):  # not imported, or Python's and the platform's come first
        lab.write(other, "VALUE = 1")
    for package in ("", "# a licence\n", '"""What is in it."""\n'):
        lab.write("pkg/__init__.py", package)
        assert registry.source("pkg.net:Net") == lab.hash_of("pkg/net.py")
        assert values("pkg.net:Net") == ()


FORMS = {
    "import os, helper as h": "helper.py", "from helper import *": "helper.py", "import middle": "helper.py",
    "import circle": "helper.py", "import pkg.sub": "pkg/sub.py", "from pkg import sub": "pkg/sub.py",
    "from pkg.other import NOTHING": "pkg/__init__.py", "import ns.deep.mod": "ns/deep/mod.py",
    "def never_called():\n    import helper": "helper.py",
    "try:\n    import helper\nexcept ImportError:\n    pass": "helper.py",
}  # fmt: skip
"""An import, and the file that it makes a neighbour."""
IN_PACKAGE = [
    ("from . import near", "lab/sub/near.py"), ("from ..far import VALUE", "lab/far.py"),
    ("from .. import far", "lab/far.py"), ("def late():\n    from lab import far", "lab/far.py"),
    ("from .near import VALUE", "lab/__init__.py"), ("", "lab/sub/__init__.py"),
]  # fmt: skip
CASES = [
    *(("net.py:Net", "net.py", *form) for form in FORMS.items()),
    ("net:Net", "net.py", "import helper", "helper.py"),
    *(("lab.sub.net:Net", "lab/sub/net.py", *form) for form in IN_PACKAGE),
]


@pytest.mark.parametrize(("name", "file", "imports", "changed"), CASES)
def test_a_changed_neighbour_changes_the_hash(lab: Lab, name: str, file: str, imports: str, changed: str) -> None:
    lab.net(file, imports)
    lab.write("middle.py", "def late():\n    from helper import VALUE")
    lab.write("circle.py", "import circle, helper, net")
    lab.write("pkg/other.py", "NOTHING = 0")
    for other in ("helper.py", "pkg/__init__.py", "pkg/sub.py", "ns/deep/mod.py", "lab/__init__.py",
                  "lab/sub/__init__.py", "lab/sub/near.py", "lab/far.py"):  # fmt: skip
        lab.write(other, "VALUE = 1")
    before = registry.source(name)
    assert before != lab.hash_of(file)
    assert registry.find("model", name)
    lab.write(changed, "VALUE = 2")
    assert registry.source(name) != before
    lab.write(changed, "VALUE = 1")
    assert registry.source(name) == before


def test_hashing_runs_nothing(lab: Lab) -> None:
    lab.net("net.py", "import helper")
    lab.write("helper.py", "import pathlib\npathlib.Path('executed').touch()")
    assert registry.source("net.py:Net") != lab.hash_of("net.py")
    assert not (lab.folder / "executed").exists()


@pytest.mark.parametrize("where", ["net.py", "pkg.net"])
def test_a_process_runs_the_code_that_it_hashed_and_no_other(lab: Lab, where: str) -> None:
    """A neighbour changes while the process lives, within a second and to the same size; one is imported late."""
    folder = "pkg/" if "pkg" in where else ""
    near = "pkg.helper" if folder else "helper"
    expression = f"helper.VALUE, __import__('importlib').import_module('{near}').VALUE, late()"
    lab.net(f"{folder}net.py", f"import {near} as helper", expression)
    text = (lab.folder / f"{folder}net.py").read_text()
    lab.write(f"{folder}net.py", f"{text}\n\ndef late():\n    import {near} as late\n    return late.VALUE\n")
    for value in (1, 2, 1):
        lab.write(f"{folder}helper.py", f"VALUE = {value}")
        assert values(f"{where}:Net") == (value, value, value)
    lab.write(f"{folder}helper.py", "VALUE = 3")
    assert registry.find("model", f"{where}:Net").values() == (1, 1, 1)  # the new file is not hashed yet
    assert not list(lab.folder.rglob("*.pyc"))


def test_neighbours_of_one_name_in_two_folders_are_not_mixed_up(lab: Lab) -> None:
    for name in ("a", "b"):
        lab.net(f"{name}/net.py", "import utils\ndef late():\n    from utils import VALUE\n    return VALUE", "late()")
        lab.write(f"{name}/utils.py", f"VALUE = {name!r}")
    lab.write("b/cut.py", "import utils\ndef cut(labels, n_clients):\n    return [range(9), range(9, 18)]")
    assert [values(f"{name}/net.py:Net") for name in "abab"] == ["a", "b", "a", "b"]
    check(choose({"model.name": "b/net.py:Net", "partition.name": "b/cut.py:cut"}))
    with pytest.raises(UserError, match=r"different modules called utils .*rename one"):
        check(choose({"model.name": "a/net.py:Net", "partition.name": "b/cut.py:cut"}))


MISSING = [
    ("net.py", "import helpr", "net.py (line 1) helpr 'helper'?"),
    ("net.py", "import broken", "broken.py (line 2) nothing"), ("net.py", "from ns import mood", "ns.mood 'ns.mod'?"),
    ("pkg.net", "def f():\n    from . import subb", "pkg.subb 'pkg.sub'?"), ("net.py", "import wrong", "SyntaxError"),
    ("net.py", "import pkg.subb", "pkg.subb 'pkg.sub'?"), ("net.py", "from .helper import x", "relatively package"),
    ("net.py", "from helper import VALU", "ImportError 'VALU' 'helper'"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "text", "words"), MISSING)
def test_a_missing_neighbour_is_named_in_one_sentence(lab: Lab, name: str, text: str, words: str) -> None:
    lab.net(name if name.endswith(".py") else "pkg/net.py", text)
    for other in ("helper.py", "pkg/sub.py", "ns/mod.py"):
        lab.write(other, "VALUE = 1")
    lab.write("pkg/__init__.py", "")
    lab.write("broken.py", "\nimport nothing")
    lab.write("wrong.py", "def f(:")
    with pytest.raises(UserError) as error:
        build.build(choose({"model.name": f"{name}:Net"}))
    sentence = str(error.value)
    assert "\n" not in sentence
    assert [word for word in [f"'{name}", *words.split()] if word not in sentence] == [], sentence


MAY_FAIL = {
    "from contextlib import suppress\nwith suppress(ImportError):\n    from pkg import subb",
    "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from helpr import x",
    "from pkg import made", "def never_called():\n    import modern.sub",
}  # fmt: skip


def test_an_import_that_may_fail_is_not_missed(lab: Lab) -> None:
    lab.write("pkg/__init__.py", "made = 1")
    lab.write("modern/__init__.py", "__path__.append('elsewhere')")
    for text in MAY_FAIL:
        lab.net("net.py", text)
        assert values("net.py:Net") == ()


def test_a_run_keeps_its_code_when_its_changed_files_are_reported(lab: Lab) -> None:
    lab.net("net.py", values="1")
    config = choose({"model.name": "net.py:Net"})
    assert build.changed_sources(config) == ""
    lab.net("net.py", values="2")
    assert "net.py is not the file it was" in build.changed_sources(config)
    assert registry.find("model", "net.py:Net").values() == 1
