"""The package: builds are equal, the wheel has all that it needs, and the lock has every requirement with hashes."""

import json
import os
import re
import subprocess
import sys
import tarfile
import tomllib
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import fedcommons
from fedcommons.sweeping import command

ROOT = Path(__file__).parent.parent
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT = PYPROJECT["project"]
SBOM = json.loads((ROOT / ".ci" / "fedcommons.cdx.json").read_text())
APACHE_2 = "cfc7749b96f63bd31c3c42b5c471bf756814053e847c10f3eb003417bc523d30"
"""SHA-256 of https://www.apache.org/licenses/LICENSE-2.0.txt."""


def lines(name: str) -> list[str]:
    """Return the lines of a lock file without comments; a line that goes on in the next is one."""
    text = re.sub(r"\s*\\\n\s*", " ", (ROOT / name).read_text())
    return [line for line in text.splitlines() if line and not line.startswith("#")]


def pins(name: str) -> list[Requirement]:
    return [Requirement(line.partition(" --hash")[0]) for line in lines(name)]


def test_lock_and_constraints_name_the_same_versions_and_the_lock_has_hashes() -> None:
    locked, constrained = pins("requirements.lock"), pins("constraints.txt")
    assert set(map(str, locked)) == set(map(str, constrained))
    assert len({pin.name for pin in locked}) == len(locked) == len(constrained) > 100
    for line in lines("requirements.lock"):
        pin, start, rest = line.partition(" --hash")
        assert re.fullmatch(r"[\w.-]+==[\w.]+( ; .+)?", pin), line
        assert re.fullmatch(r"( --hash=sha256:[0-9a-f]{64})+", start + rest), pin


def test_every_requirement_is_locked_in_a_version_that_fits() -> None:
    extras = [text for texts in PROJECT["optional-dependencies"].values() for text in texts]
    locked = {str(canonicalize_name(pin.name)): next(iter(pin.specifier)).version for pin in pins("requirements.lock")}
    for text in [*PYPROJECT["build-system"]["requires"], *PROJECT["dependencies"], *extras]:
        wanted = Requirement(text)
        if wanted.name == PROJECT["name"]:  # dev asks for the other extras
            continue
        version = locked.get(canonicalize_name(wanted.name))
        assert version, f"run `make lock`: {text} is not in requirements.lock"
        assert wanted.specifier.contains(version, prereleases=True), f"run `make lock`: {text}, not {version}"
    (ray,) = [r for r in map(Requirement, PROJECT["dependencies"]) if r.name == "ray"]
    assert not [v for v in ("2.9", "2.52.1", "2.53.9") if v in ray.specifier]  # CVE-2026-27482
    assert f"rayproject/ray:{locked['ray']}-" in (ROOT / "ray_cluster.yaml").read_text()


def test_the_list_of_packages_is_what_an_installation_brings() -> None:
    listed = {f"{one['name']}=={one['version']}" for one in SBOM["components"]}
    assert len(listed) == len(SBOM["components"])
    assert listed < {str(pin).partition(";")[0].strip() for pin in pins("requirements.lock")}
    names = {one["name"] for one in SBOM["components"]}
    assert {canonicalize_name(Requirement(text).name) for text in PROJECT["dependencies"]} <= names
    assert not {"pytest", "ruff", "pyright", "hatchling"} & names
    mine, (graph,) = SBOM["metadata"]["component"], SBOM["dependencies"]
    assert (mine["name"], mine["version"]) == (PROJECT["name"], PROJECT["version"])
    purls = {f"pkg:pypi/{one['name']}@{one['version']}" for one in SBOM["components"]}
    assert len(graph["dependsOn"]) == len(PROJECT["dependencies"])
    assert set(graph["dependsOn"]) <= purls
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == PROJECT["version"] == fedcommons.__version__


BUILD = """
import os, sys
os.umask(int(sys.argv[1]))
from hatchling.build import build_sdist, build_wheel
print(build_wheel('.'), build_sdist('.'))
"""


@pytest.fixture(scope="module")
def builds(tmp_path_factory: pytest.TempPathFactory) -> list[list[Path]]:
    """Return wheel and source of one tree in two folders: with other times, umasks, orders of files and zones."""
    names = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    parts = ("platform/", "lightning_modules/", "sweeps/", ".ci/", "pyproject.toml", "README.md", "LICENSE")
    files = [name for name in sorted(names.split("\0")) if name.startswith(parts)]
    found = []
    for number, (umask, zone) in enumerate([(0o022, "UTC"), (0o077, "Asia/Kathmandu")]):
        source = tmp_path_factory.mktemp("source" * (number + 1))
        for name in reversed(files) if number else files:
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_bytes((ROOT / name).read_bytes())
            (source / name).chmod(0o666 & ~umask)
            os.utime(source / name, (10**9 * (number + 1), 10**9 * (number + 1)))
        (source / "platform" / "fedcommons" / "__pycache__").mkdir()
        (source / "platform" / "fedcommons" / "__pycache__" / "paths.pyc").write_bytes(os.urandom(8))
        variables = {**os.environ, "TZ": zone, "PYTHONHASHSEED": str(number)}
        done = subprocess.run(
            [sys.executable, "-c", BUILD, str(umask)], cwd=source, env=variables, capture_output=True, text=True,
            check=True,
        )  # fmt: skip
        found.append([source / name for name in done.stdout.split()[-2:]])
    return found


@pytest.mark.long
def test_two_builds_are_equal(builds: list[list[Path]]) -> None:
    assert len({sha256(wheel.read_bytes()).hexdigest() for wheel, _ in builds}) == 1


@pytest.mark.long
def test_the_wheel_has_every_module_the_licence_and_the_list(builds: list[list[Path]]) -> None:
    path, source = builds[0]
    info = f"fedcommons-{PROJECT['version']}.dist-info"
    with ZipFile(path) as wheel:
        assert json.loads(wheel.read(f"{info}/sboms/fedcommons.cdx.json")) == SBOM
        assert sha256(wheel.read(f"{info}/licenses/LICENSE")).hexdigest() == APACHE_2
        modules = {name for name in wheel.namelist() if not name.startswith(info)}
    expected = {path.relative_to(ROOT / "platform").as_posix() for path in (ROOT / "platform").rglob("*.py")}
    for folder, name in (("lightning_modules", "lightning_modules"), ("sweeps", "fedcommons_sweeps")):
        expected |= {f"{name}/{path.relative_to(ROOT / folder).as_posix()}" for path in (ROOT / folder).rglob("*.py")}
    assert {name for name in modules if name.endswith(".py")} == expected
    assert {f"fedcommons/reports/template/page.{end}" for end in ("html", "css", "js")} <= modules
    assert "fedcommons/py.typed" in modules
    assert {Path(name).suffix for name in modules} <= {".py", ".typed", ".csv", ".html", ".css", ".js"}
    with tarfile.open(source) as files:
        assert {"LICENSE", "README.md"} <= {name.partition("/")[2] for name in files.getnames()}


@pytest.fixture(scope="module")
def installed(builds: list[list[Path]], tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Any]:
    """Return the command ``fedcommons`` of the wheel, installed outside of the clone."""
    target = tmp_path_factory.mktemp("installed")
    options = ["--quiet", "--no-deps", "--no-index", "--disable-pip-version-check", "--target", str(target)]
    subprocess.run([sys.executable, "-m", "pip", "install", *options, str(builds[0][0])], check=True, timeout=100)

    def run(*words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
        variables = {**os.environ, "PYTHONPATH": str(target)}
        command = [str(target / "bin" / "fedcommons"), *words]
        return subprocess.run(command, cwd=cwd, env=variables, capture_output=True, text=True, timeout=300)

    return run


@pytest.mark.long
def test_the_installed_command_lists_the_sweeps_and_runs_them(installed: Callable[..., Any], tmp_path: Path) -> None:
    listed = installed("--help", cwd=tmp_path)
    assert listed.returncode == 0, listed.stderr
    assert all(len(line) <= 80 for line in listed.stdout.splitlines())
    whole = re.sub(r"\n {5,}", " ", listed.stdout)  # a longer sentence goes on under itself
    names = {line.split()[0] for line in whole.splitlines() if line.startswith("  ")}
    assert names == {path.stem for path in (ROOT / "sweeps").glob("*.py")}
    wrong = installed("tabel1", cwd=tmp_path)
    assert (wrong.returncode, wrong.stdout) == (2, "")
    assert "'tabel1'; did you mean 'table1'" in wrong.stderr
    assert installed("--version", cwd=tmp_path).stdout == f"fedcommons {PROJECT['version']}\n"
    assert "usage: " in installed("communication-saved", "--help", cwd=tmp_path).stdout
    refused = installed("run", "--client.lr", "-1", cwd=tmp_path)
    assert (refused.returncode, refused.stderr.startswith("error: client.lr must lie in")) == (2, True)
    assert list(tmp_path.iterdir()) == []
    fields = ["--preset", "smoke", "--wandb", "off", "--federation.rounds", "1", "--data.limit", "60", "--json"]
    done = installed("run", *fields, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["rounds"] == 1


def test_in_a_clone_the_command_runs_the_sweeps_of_the_clone() -> None:
    assert command.folder() == ROOT / "sweeps"
