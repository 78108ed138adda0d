"""requirements.lock and constraints.txt name the same versions, of all that the project asks for, each with hashes."""

import os
import re
import subprocess
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parent.parent
HASHES = re.compile(r"( --hash=sha256:[0-9a-f]{64})+")


def lines(name: str) -> list[str]:
    """Without comments; a line that goes on in the next is one."""
    text = re.sub(r"\s*\\\n\s*", " ", (ROOT / name).read_text())
    return [line for line in text.splitlines() if line and not line.startswith("#")]


def pins(name: str) -> list[Requirement]:
    return [Requirement(line.partition(" --hash")[0]) for line in lines(name)]


def test_every_line_of_the_lock_has_hashes_and_nothing_but_the_pin_before_them() -> None:
    for line in lines("requirements.lock"):
        pin, start, rest = line.partition(" --hash")
        assert re.fullmatch(r"[\w.-]+==[\w.]+( ; .+)?", pin), line
        assert HASHES.fullmatch(start + rest), pin


def test_lock_and_constraints_name_the_same_versions() -> None:
    locked, constrained = pins("requirements.lock"), pins("constraints.txt")
    assert set(map(str, locked)) == set(map(str, constrained))
    assert len({pin.name for pin in locked}) == len(locked) == len(constrained) > 100


def test_all_that_the_project_asks_for_is_locked_in_a_version_that_fits() -> None:
    content = tomllib.loads((ROOT / "pyproject.toml").read_text())
    asked = [
        *content["build-system"]["requires"],
        *content["project"]["dependencies"],
        *(text for texts in content["project"]["optional-dependencies"].values() for text in texts),
    ]
    locked = {canonicalize_name(pin.name): next(iter(pin.specifier)).version for pin in pins("requirements.lock")}
    for text in asked:
        wanted = Requirement(text)
        if wanted.name == content["project"]["name"]:  # dev asks for the other extras
            continue
        version = locked.get(canonicalize_name(wanted.name))
        assert version, f"run `make lock`: {text} is not in requirements.lock"
        assert wanted.specifier.contains(version, prereleases=True), f"run `make lock`: {text}, not {version}"


@pytest.mark.parametrize("locked", [False, True])
def test_the_lock_is_installed_where_asked_for(locked: bool, tmp_path: Path) -> None:
    """What make would run: with the lock nothing that is not in it, not even to build this project."""
    variables = [f"VENV={tmp_path / 'venv'}", *(["LOCKED=1"] if locked else [])]
    environment = {"PATH": os.environ["PATH"]}  # not LOCKED, nor what a `make LOCKED=1 test` around this tells its own
    commands = subprocess.run(
        ["make", "--dry-run", *variables, "test"], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    installs = [line.split("install --quiet ")[1] for line in commands.stdout.splitlines() if "pip install" in line]
    assert [("requirements.lock" in line, "--require-hashes" in line) for line in installs[:1]] == [(locked, locked)]
    assert ["--no-deps --no-build-isolation" in line for line in installs] == ([False, True] if locked else [False])
