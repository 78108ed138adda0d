"""The package: builds are equal, the wheel has all that it needs, and the lock has every requirement with hashes."""

import json
import os
import re
import subprocess
import sys
import tarfile
import tomllib
from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path
from zipfile import ZipFile

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import fedcommons
from fedcommons.cli import main

ROOT = Path(__file__).parent.parent
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT = PYPROJECT["project"]
SBOM = json.loads((ROOT / ".ci" / "fedcommons.cdx.json").read_text())
APACHE_2 = "cfc7749b96f63bd31c3c42b5c471bf756814053e847c10f3eb003417bc523d30"
"""SHA-256 of https://www.apache.org/licenses/LICENSE-2.0.txt."""


def pins(name: str) -> list[tuple[Requirement, str]]:
    """Return the requirements of a lock file, each with its hashes, which stand in lines that go on."""
    text = re.sub(r"\s*\\\n\s*", " ", (ROOT / name).read_text())
    parts = [line.partition(" --hash") for line in text.splitlines() if line and not line.startswith("#")]
    return [(Requirement(pin), start + hashes) for pin, start, hashes in parts]


def test_every_requirement_is_locked_in_a_version_that_fits() -> None:
    locked, constrained = pins("requirements.lock"), pins("constraints.txt")
    assert {str(pin) for pin, _ in locked} == {str(pin) for pin, _ in constrained}
    assert len({pin.name for pin, _ in locked}) == len(locked) == len(constrained) > 100
    assert not [pin for pin, hashes in locked if not re.fullmatch(r"( --hash=sha256:[0-9a-f]{64})+", hashes)]
    assert not [pin for pin, _ in locked if [s.operator for s in pin.specifier] != ["=="]]
    versions = {str(canonicalize_name(pin.name)): next(iter(pin.specifier)).version for pin, _ in locked}
    optional = PROJECT["optional-dependencies"]
    extras = [text for extra, texts in optional.items() for text in texts if extra != "peft"]  # not in dev
    for text in [*PYPROJECT["build-system"]["requires"], *PROJECT["dependencies"], *extras]:
        wanted = Requirement(text)
        version = versions.get(canonicalize_name(wanted.name))
        is_mine = wanted.name == PROJECT["name"]  # dev asks for the other extras
        assert is_mine or (version and wanted.specifier.contains(version, prereleases=True)), f"`make lock`: {text}"
    (ray,) = [r for r in map(Requirement, PROJECT["dependencies"]) if r.name == "ray"]
    assert not [v for v in ("2.9", "2.52.1", "2.53.9") if v in ray.specifier]  # CVE-2026-27482
    assert f"rayproject/ray:{versions['ray']}-" in (ROOT / "cluster" / "aws.yaml").read_text()


def test_the_list_of_packages_is_what_an_installation_brings() -> None:
    listed = {entry["name"]: entry["version"] for entry in SBOM["components"]}
    pinned = {str(pin).partition(";")[0].strip() for pin, _ in pins("requirements.lock")}
    assert {f"{name}=={version}" for name, version in listed.items()} < pinned
    assert {canonicalize_name(Requirement(text).name) for text in PROJECT["dependencies"]} <= listed.keys()
    assert not {"pytest", "ruff", "pyright", "hatchling"} & listed.keys()
    citation, component = yaml.safe_load((ROOT / "CITATION.cff").read_text()), SBOM["metadata"]["component"]
    assert component["version"] == citation["version"] == PROJECT["version"] == fedcommons.__version__


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
    archives = []
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
        words = [sys.executable, "-c", BUILD, str(umask)]
        done = subprocess.run(words, cwd=source, env=variables, capture_output=True, text=True, check=True)
        archives.append([source / name for name in done.stdout.split()[-2:]])
    return archives


@pytest.mark.long
def test_two_builds_are_equal(builds: list[list[Path]]) -> None:
    for same in zip(*builds, strict=True):  # the wheels, and the sources
        assert len({sha256(path.read_bytes()).hexdigest() for path in same}) == 1


@pytest.mark.long
def test_the_wheel_has_every_module_the_licence_and_the_list(builds: list[list[Path]]) -> None:
    path, source = builds[0]
    info = f"fedcommons-{PROJECT['version']}.dist-info"
    with ZipFile(path) as wheel:
        assert json.loads(wheel.read(f"{info}/sboms/fedcommons.cdx.json")) == SBOM
        assert sha256(wheel.read(f"{info}/licenses/LICENSE")).hexdigest() == APACHE_2
        modules = {name for name in wheel.namelist() if not name.startswith(info)}
    package = ROOT / "platform" / "fedcommons"
    expected = {path.relative_to(ROOT / "platform").as_posix() for path in package.rglob("*.py")}
    for folder, name in (("lightning_modules", "lightning_modules"), ("sweeps", "fedcommons_sweeps")):
        expected |= {f"{name}/{path.relative_to(ROOT / folder).as_posix()}" for path in (ROOT / folder).rglob("*.py")}
    assert {name for name in modules if name.endswith(".py")} == expected
    others = {f"fedcommons/reports/template/page.{end}" for end in ("html", "css", "js")} | {
        "fedcommons/py.typed",
        "fedcommons/__init__.pyi",
    }
    assert others <= modules
    assert {Path(name).suffix for name in modules} <= {".py", ".pyi", ".sh", ".typed", ".csv", ".html", ".css", ".js"}
    with tarfile.open(source) as files:
        assert {"LICENSE", "README.md"} <= {name.partition("/")[2] for name in files.getnames()}


@pytest.mark.long
def test_the_installed_command_lists_the_sweeps_and_runs_them(builds: list[list[Path]], tmp_path: Path) -> None:
    target, here = tmp_path / "installed", tmp_path / "here"
    options = ["--quiet", "--no-deps", "--no-index", "--disable-pip-version-check", "--target", str(target)]
    subprocess.run([sys.executable, "-m", "pip", "install", *options, str(builds[0][0])], check=True, timeout=300)
    here.mkdir()

    def fedcommons(*words: str) -> subprocess.CompletedProcess[str]:
        line, variables = [str(target / "bin" / "fedcommons"), *words], {**os.environ, "PYTHONPATH": str(target)}
        return subprocess.run(line, cwd=here, env=variables, capture_output=True, text=True, timeout=300)

    whole = re.sub(r"\n {5,}", " ", fedcommons("--help").stdout)  # a longer sentence goes on under itself
    names = {line.split()[0] for line in whole.splitlines() if line.startswith("  ")}
    assert names == {path.stem for path in (ROOT / "sweeps").glob("*.py")} | main.COMMANDS.keys()
    wrong = fedcommons("tabel1")
    assert (wrong.returncode, "'tabel1'; did you mean 'table1'" in wrong.stderr) == (2, True)
    assert fedcommons("--version").stdout == f"fedcommons {PROJECT['version']}\n"
    assert list(here.iterdir()) == []
    done = fedcommons("run", "--preset=smoke", "--wandb=off", "--federation.rounds=1", "--data.limit=60", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["rounds"] == 1
    assert main.folder() == ROOT / "sweeps"  # in a clone those of the clone
    spec = find_spec("fedcommons_sweeps.referee")
    assert spec is not None
    assert spec.origin == str(ROOT / "sweeps" / "referee.py")
