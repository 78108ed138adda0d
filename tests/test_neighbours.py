"""A part's digest covers the modules of the user's that it imports, and a process runs what was hashed."""

import importlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path

import pytest

from fedcommons.config import imported, parts
from fedcommons.config.flat import choose
from fedcommons.errors import UserError
from fedcommons.runs import build
from fedcommons.runs.checks import check

ROOT = Path(__file__).parent.parent
NET = """
from torch import nn


class Net(nn.Module):
    def __init__(self, shape, n_classes, width: int = 4):
        super().__init__()
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(64, n_classes))

    def forward(self, x):
        return self.body(x / 255)

    def values():
        return ()
"""


class Lab:
    """A folder of somebody's modules, from which commands are given."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def write(self, name: str, text: str) -> None:
        """Write a file in the second of all others, so that a .pyc could not be told from a fresh one."""
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        os.utime(path, (1e9, 1e9))

    def net(self, name: str, imports: str = "", values: str = "()") -> None:
        """Write a part that imports; ``values``: what ``Net.values`` gives."""
        self.write(name, f"{imports}\n{NET}".replace("return ()", f"return {values}"))

    def digest_of(self, name: str) -> str:
        return sha256((self.folder / name).read_bytes()).hexdigest()[:24]


@pytest.fixture
def lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Lab:
    (tmp_path / "lab").mkdir()
    monkeypatch.chdir(tmp_path / "lab")
    return Lab(tmp_path / "lab")


def values(name: str) -> tuple:
    """What the part's code gives that a process uses once it has been hashed."""
    parts.source(name)
    return parts.find("model", name).values()


def refusal(name: str) -> str:
    with pytest.raises(UserError) as error:
        build.prepare(choose({"model.name": name}))
    assert "\n" not in str(error.value)
    return str(error.value)


# --- what is hashed


@pytest.mark.parametrize("imports", ["", "import os, torch\nimport numpy as np", "import yaml, statistics"])
@pytest.mark.parametrize("name", ["net.py:Net", "net:Net", "pkg.net:Net", "pkg/net.py:Net"])
@pytest.mark.parametrize("package", ["", "# a licence\n", '"""What is in it."""\n'])
def test_without_neighbours_the_digest_is_that_of_the_file(lab: Lab, name: str, imports: str, package: str) -> None:
    file = name.partition(":")[0].removesuffix(".py").replace(".", "/") + ".py"
    lab.net(file, imports)
    lab.write("pkg/__init__.py", package)
    lab.write("helper.py", "not imported = True")
    lab.write("statistics.py", "Python's own comes first")
    lab.write("yaml.py", "what the platform uses is nobody's neighbour")
    assert parts.source(name) == lab.digest_of(file)
    assert values(name) == ()


FORMS = {
    "import": "import helper",
    "as": "import os, helper as h",
    "from": "from helper import VALUE",
    "star": "from helper import *",
    "through another": "import middle",
    "through a cycle": "import circle",
    "of a package": "import pkg.sub",
    "from a package": "from pkg import sub",
    "the package's file": "from pkg.other import NOTHING",
    "without __init__": "import ns.deep.mod",
    "from without __init__": "from ns.deep import mod",
    "late": "def never_called():\n    import helper",
    "in a class": "class Other:\n    import helper",
    "if it is there": "try:\n    import helper\nexcept ImportError:\n    pass",
    "under a condition": "if True:\n    import helper",
}
CHANGED = {
    "of a package": "pkg/sub.py",
    "from a package": "pkg/sub.py",
    "the package's file": "pkg/__init__.py",
    "without __init__": "ns/deep/mod.py",
    "from without __init__": "ns/deep/mod.py",
}


@pytest.mark.parametrize("where", ["net.py", "net"])
@pytest.mark.parametrize("form", FORMS)
def test_a_changed_neighbour_changes_the_digest_however_it_is_imported(lab: Lab, form: str, where: str) -> None:
    lab.net("net.py", FORMS[form])
    lab.write("middle.py", "def late():\n    from helper import VALUE")
    lab.write("circle.py", "import circle, helper, net")
    lab.write("pkg/other.py", "NOTHING = 0")
    for name in ("helper.py", "pkg/__init__.py", "pkg/sub.py", "ns/deep/mod.py"):
        lab.write(name, "VALUE = 1")
    before = parts.source(f"{where}:Net")
    assert before != lab.digest_of("net.py")
    assert parts.find("model", f"{where}:Net")
    lab.write(CHANGED.get(form, "helper.py"), "VALUE = 2")
    assert parts.source(f"{where}:Net") != before
    lab.write(CHANGED.get(form, "helper.py"), "VALUE = 1")
    assert parts.source(f"{where}:Net") == before


@pytest.mark.parametrize(
    ("imports", "changed"),
    [
        ("from . import near", "lab/sub/near.py"),
        ("from .near import VALUE", "lab/sub/near.py"),
        ("from .. import far", "lab/far.py"),
        ("from ..far import VALUE", "lab/far.py"),
        ("def late():\n    from lab import far", "lab/far.py"),
        ("from .near import VALUE", "lab/__init__.py"),
        ("", "lab/sub/__init__.py"),
    ],
)
def test_a_part_of_a_package_has_neighbours_in_it(lab: Lab, imports: str, changed: str) -> None:
    lab.net("lab/sub/net.py", imports)
    for name in ("lab/__init__.py", "lab/sub/__init__.py", "lab/sub/near.py", "lab/far.py"):
        lab.write(name, "VALUE = 1")
    before = parts.source("lab.sub.net:Net")
    assert before != lab.digest_of("lab/sub/net.py")
    assert parts.find("model", "lab.sub.net:Net")
    lab.write(changed, "VALUE = 2")
    assert parts.source("lab.sub.net:Net") != before


def test_a_neighbour_may_be_a_link_and_lie_in_a_folder_that_is_one(lab: Lab, tmp_path: Path) -> None:
    elsewhere = Lab(tmp_path / "elsewhere")
    elsewhere.net("net.py", "import helper")
    elsewhere.write("helper.py", "VALUE = 1")
    (lab.folder / "there").symlink_to(elsewhere.folder)
    (lab.folder / "net.py").symlink_to(elsewhere.folder / "net.py")
    (lab.folder / "helper.py").symlink_to(elsewhere.folder / "helper.py")
    before = [parts.source(f"{where}:Net") for where in ("net.py", "there/net.py", "net", "there.net")]
    assert before[0] != lab.digest_of("net.py")
    elsewhere.write("helper.py", "VALUE = 2")
    after = [parts.source(f"{where}:Net") for where in ("net.py", "there/net.py", "net", "there.net")]
    assert not {*before} & {*after}


def test_only_files_that_are_imported_are_opened_and_none_is_run(lab: Lab) -> None:
    """Whatever else lies beside the part."""
    lab.net("net.py", "import helper")
    lab.write("helper.py", "import pathlib\npathlib.Path('executed').touch()")
    for i in range(1000):
        lab.write(f"other_{i}.py", "VALUE = 1")
    code = (
        "import sys\nfrom fedcommons.config import parts\nopened = set()\n"
        "sys.addaudithook(lambda event, given: opened.add(str(given[0])) if event == 'open' else None)\n"
        "parts.source('net.py:Net')\nprint(*sorted(opened), sep='\\n')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    opened = [line for line in done.stdout.splitlines() if line.startswith(str(lab.folder))]
    assert opened == [str(lab.folder / name) for name in ("helper.py", "net.py")]
    assert not (lab.folder / "executed").exists()


@pytest.mark.long
def test_what_the_platform_imports_is_nobodys_neighbour() -> None:
    """A process cannot load torch a second time, also where somebody works on torch in the folder of the command."""
    files = [path for folder in ("platform", "lightning_modules") for path in (ROOT / folder).rglob("*.py")]
    names = {line.module.partition(".")[0] for path in files for line in imported.imports(path.read_bytes())}
    assert names - {*sys.stdlib_module_names} <= imported.PLATFORM


# --- what is run is what was hashed


@pytest.mark.parametrize("where", ["net.py", "net", "pkg.net", "pkg/net.py"])
def test_a_process_runs_the_code_that_it_hashed_and_no_other(lab: Lab, where: str) -> None:
    """A neighbour was changed while the process lives, within a second and to the same size; one is imported late."""
    folder = "pkg/" if "pkg" in where else ""
    near = "pkg.helper" if where == "pkg.net" else "helper"
    lab.net(
        f"{folder}net.py",
        f"import {near} as helper",
        f"helper.VALUE, __import__('importlib').import_module('{near}').VALUE, late()",
    )
    text = (lab.folder / f"{folder}net.py").read_text()
    lab.write(f"{folder}net.py", f"{text}\n\ndef late():\n    import {near} as late\n    return late.VALUE\n")
    seen = []
    for value in (1, 2, 1):
        lab.write(f"{folder}helper.py", f"VALUE = {value}")
        seen.append(values(f"{where}:Net"))
    assert seen == [(1, 1, 1), (2, 2, 2), (1, 1, 1)]
    lab.write(f"{folder}helper.py", "VALUE = 3")
    assert parts.find("model", f"{where}:Net").values() == (1, 1, 1)  # nobody has hashed that yet
    assert not list(lab.folder.rglob("*.pyc"))


def test_what_a_function_imports_later_is_what_was_hashed(lab: Lab) -> None:
    lab.net("net.py", "def late():\n    from helper import VALUE\n    return VALUE", "late()")
    lab.write("helper.py", "VALUE = 1")
    parts.source("net.py:Net")
    lab.write("helper.py", "VALUE = 2")
    assert parts.find("model", "net.py:Net").values() == 1


def test_a_folder_that_may_not_be_entered_is_passed_over_as_python_does(
    as_nobody: Callable[[Callable[[], None]], None],
) -> None:
    """On PYTHONPATH every run was refused for it, in the name of the part that imported something."""

    def look() -> None:
        with tempfile.TemporaryDirectory() as folder:
            (closed := Path(folder, "closed")).mkdir()
            (file := Path(folder, "helper.py")).touch()
            (closed / "helper.py").touch()
            closed.chmod(0)
            sys.path.insert(0, str(closed))
            assert imported.Search([Path(folder)]).place("helper") == imported.Place(file)
            closed.chmod(0o700)

    as_nobody(look)


def test_what_somebody_imported_by_hand_is_not_what_was_hashed(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a notebook, where a helper is tried first."""
    monkeypatch.syspath_prepend(str(lab.folder))
    lab.write("by_hand.py", "VALUE = 1")
    by_hand = importlib.import_module("by_hand")
    lab.write("by_hand.py", "VALUE = 2")
    lab.net("net.py", "import by_hand", "by_hand.VALUE")
    assert values("net.py:Net") == 2
    assert by_hand.VALUE == 1
    lab.write("by_hand.py", "VALUE = 3")
    assert importlib.reload(sys.modules["by_hand"]).VALUE == 3
    assert values("net.py:Net") == 3


def test_parts_that_import_the_same_neighbour_share_it(lab: Lab) -> None:
    lab.write("helper.py", "class Thing: pass")
    for name in ("one.py", "two.py"):
        lab.net(name, "from helper import Thing", "Thing")
    assert values("one.py:Net") is values("two.py:Net")


def test_neighbours_of_one_name_in_two_folders_are_not_mixed_up(lab: Lab) -> None:
    """A folder that was used before does not decide what a part imports; one experiment cannot have both."""
    for name in ("a", "b"):
        lab.net(f"{name}/net.py", "import utils\ndef late():\n    from utils import VALUE\n    return VALUE", "late()")
        lab.write(f"{name}/utils.py", f"VALUE = {name!r}")
    lab.write("b/cut.py", "import utils\ndef cut(labels, n_clients):\n    return [range(9), range(9, 18)]")
    assert [values(f"{name}/net.py:Net") for name in "abab"] == ["a", "b", "a", "b"]
    check(choose({"model.name": "b/net.py:Net", "partition.name": "b/cut.py:cut"}))
    with pytest.raises(UserError, match=r"import different modules called utils .*rename one"):
        check(choose({"model.name": "a/net.py:Net", "partition.name": "b/cut.py:cut"}))


def test_a_part_may_ask_for_itself_while_it_is_imported(lab: Lab) -> None:
    lab.net("net.py", "import helper")
    lab.write("helper.py", "from fedcommons.config import parts\nparts.source('net.py:Net')")
    assert values("net.py:Net") == ()


# --- what is missing


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        (
            "net.py",
            "import helpr",
            "net.py (line 1) imports helpr, and there is no such module; did you mean 'helper'?",
        ),
        ("net.py", "import not_there", "net.py (line 1) imports not_there, and there is no such module."),
        ("net.py", "import broken", "broken.py (line 2) imports nothing, and there is no such module."),
        ("net.py", "def f():\n    import helpr", "net.py (line 2) imports helpr, and there is no such module; did"),
        ("net.py", "from pkg import subb", "imports pkg.subb, and there is no such module; did you mean 'pkg.sub'?"),
        ("net.py", "import pkg.subb", "imports pkg.subb, and there is no such module; did you mean 'pkg.sub'?"),
        ("net.py", "from ns import mood", "imports ns.mood, and there is no such module; did you mean 'ns.mod'?"),
        ("pkg/net.py", "def f():\n    from . import subb", "imports pkg.subb, and there is no such module; did you"),
        ("pkg/net.py", "from .subb import x", "imports pkg.subb, and there is no such module; did you mean 'pkg.sub'?"),
        ("net.py", "from .helper import x", "imports relatively, which only a module in a package can"),
        ("net.py", "from helper import VALU", "ImportError: cannot import name 'VALU' from 'helper'"),
        ("net.py", "import wrong", "SyntaxError: "),
    ],
)
def test_a_missing_neighbour_is_told_in_one_sentence(lab: Lab, name: str, text: str, said: str) -> None:
    lab.net(name, text)
    for other in ("helper.py", "pkg/sub.py", "ns/mod.py"):
        lab.write(other, "VALUE = 1")
    lab.write("pkg/__init__.py", "")
    lab.write("broken.py", "\nimport nothing")
    lab.write("wrong.py", "def f(:")
    told = refusal(f"{name.removesuffix('.py').replace('/', '.')}:Net" if "/" in name else f"{name}:Net")
    assert said in told
    assert f"'{name.removesuffix('.py').replace('/', '.')}" in told


@pytest.mark.parametrize(
    "text",
    [
        "def never_called():\n    import not_installed",
        "try:\n    import helpr\nexcept ImportError:\n    pass",
        "from contextlib import suppress\nwith suppress(ImportError):\n    from pkg import subb",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from helpr import x",
        "from pkg import made",
        "def never_called():\n    import modern.sub",
    ],
)
def test_what_need_not_be_there_is_not_missed(lab: Lab, text: str) -> None:
    lab.net("net.py", text)
    lab.write("helper.py", "VALUE = 1")
    lab.write("pkg/__init__.py", "made = 1")
    lab.write("modern/__init__.py", "__path__.append('elsewhere')")
    lab.write("pkg/sub.py", "")
    assert values("net.py:Net") == ()
