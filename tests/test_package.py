"""The package that is handed on: equal whoever builds it, with a list of what it needs, and no Ray known to be weak."""

import json
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from fedcommons.files import sha256
from fedcommons.sweeping import command

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
SBOM = json.loads((ROOT / ".ci" / "fedcommons.cdx.json").read_text())


def locked(name: str) -> set[str]:
    """The packages of a lock file with their versions."""
    return set(re.findall(r"^\w[\w.-]*==[\w.+-]+", (ROOT / name).read_text(), re.MULTILINE))


def test_the_floor_of_ray_is_above_a_known_weakness() -> None:
    """CVE-2026-27482: versions up to 2.53."""
    (ray,) = [r for r in map(Requirement, PROJECT["dependencies"]) if r.name == "ray"]
    assert not [v for v in ("2.9", "2.52.1", "2.53", "2.53.0", "2.53.9") if v in ray.specifier]
    (pinned,) = [line.partition("==")[2] for line in locked("requirements.lock") if line.startswith("ray==")]
    assert pinned in ray.specifier
    assert f"rayproject/ray:{pinned}-" in (ROOT / "ray_cluster.yaml").read_text()


def test_the_list_is_of_the_locked_packages_that_an_installation_brings() -> None:
    """No test can resolve again what `make lock` has; without the packages of development there are fewer."""
    for one in SBOM["components"]:
        assert one["bom-ref"] == one["purl"] == f"pkg:pypi/{one['name']}@{one['version']}"
    listed = {f"{one['name']}=={one['version']}" for one in SBOM["components"]}
    assert len(listed) == len(SBOM["components"])
    for name in ("constraints.txt", "requirements.lock"):
        assert listed < locked(name)
    required = {canonicalize_name(Requirement(text).name) for text in PROJECT["dependencies"]}
    developed = {canonicalize_name(Requirement(text).name) for text in PROJECT["optional-dependencies"]["dev"]}
    names = {one["name"] for one in SBOM["components"]}
    assert required <= names
    assert not {"pytest", "ruff", "pyright", "hatchling"} & names & developed


def test_the_list_says_whose_it_is_and_what_the_package_asks_for() -> None:
    (graph,) = SBOM["dependencies"]
    mine = SBOM["metadata"]["component"]
    assert (SBOM["bomFormat"], SBOM["specVersion"]) == ("CycloneDX", "1.6")
    assert (mine["name"], mine["version"]) == (PROJECT["name"], PROJECT["version"])
    assert mine["licenses"] == [{"license": {"id": PROJECT["license"]}}]
    assert graph["ref"] == mine["bom-ref"]
    versions = {one["purl"]: one["version"] for one in SBOM["components"]}
    for asked, purl in zip(map(Requirement, sorted(PROJECT["dependencies"])), graph["dependsOn"], strict=True):
        assert purl.startswith(f"pkg:pypi/{canonicalize_name(asked.name)}@")
        assert versions[purl] in asked.specifier


BUILD = "import os, sys; os.umask(int(sys.argv[1])); from hatchling.build import build_wheel; print(build_wheel('.'))"


def build(source: Path, umask: int, **more: str) -> Path:
    """The wheel that is built in this folder."""
    command = [sys.executable, "-c", BUILD, str(umask)]
    done = subprocess.run(
        command, cwd=source, env={**os.environ, **more}, capture_output=True, text=True, check=True, timeout=100
    )
    return source / done.stdout.split()[-1]


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two, of one tree in two folders: with other times, umasks, orders of files, hash seeds and zones."""
    names = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    parts = ("platform/", "lightning_modules/", "sweeps/", ".ci/", "pyproject.toml", "README.md", "LICENSE")
    files: list[Any] = [name for name in sorted(names.split("\0")) if name.startswith(parts)]
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
        found.append(build(source, umask, TZ=zone, PYTHONHASHSEED=str(number)))
    return found


def test_two_builds_are_equal(wheels: list[Path]) -> None:
    assert len({sha256(wheel.read_bytes()) for wheel in wheels}) == 1


def test_the_wheel_carries_the_list_and_every_module(wheels: list[Path]) -> None:
    with ZipFile(wheels[0]) as wheel:
        info = f"fedcommons-{PROJECT['version']}.dist-info"
        assert json.loads(wheel.read(f"{info}/sboms/fedcommons.cdx.json")) == SBOM
        assert f"{info}/sboms/fedcommons.cdx.json,sha256=" in wheel.read(f"{info}/RECORD").decode()
        modules = {name for name in wheel.namelist() if not name.startswith(info)}
    package = [path.relative_to(ROOT / "platform") for path in (ROOT / "platform").rglob("*.py")]
    trained = [path.relative_to(ROOT) for path in (ROOT / "lightning_modules").rglob("*.py")]
    assert {path.as_posix() for path in [*package, *trained]} <= modules
    assert {path.relative_to(ROOT).as_posix() for path in (ROOT / "sweeps").rglob("*.py")} == {
        name.replace("fedcommons_sweeps/", "sweeps/") for name in modules if name.startswith("fedcommons_sweeps/")
        if name.endswith(".py")
    }  # fmt: skip
    assert {Path(name).suffix for name in modules} <= {".py", ".typed", ".csv", ".html", ".css", ".js"}
    assert {f"fedcommons/reports/template/page.{end}" for end in ("html", "css", "js")} <= modules  # of a report
    assert {name.partition("/")[0] for name in modules} == {"fedcommons", "fedcommons_sweeps", "lightning_modules"}


@pytest.fixture(scope="module")
def installed(wheels: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Any]:
    """Gives the command ``fedcommons`` of the wheel, installed outside of the clone, in an empty folder."""
    target = tmp_path_factory.mktemp("installed")
    options = ["--quiet", "--no-deps", "--no-index", "--disable-pip-version-check", "--target", str(target)]
    subprocess.run([sys.executable, "-m", "pip", "install", *options, str(wheels[0])], check=True, timeout=100)

    def run(*words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
        variables = {**os.environ, "PYTHONPATH": str(target)}
        command = [str(target / "bin" / "fedcommons"), *words]
        return subprocess.run(command, cwd=cwd, env=variables, capture_output=True, text=True, timeout=300)

    run.target = target  # type: ignore[attr-defined]
    return run


@pytest.mark.long
def test_the_installed_command_lists_the_sweeps_and_knows_what_is_meant(
    installed: Callable[..., Any], tmp_path: Path
) -> None:
    names = {path.stem for path in (ROOT / "sweeps").glob("*.py")}
    listed = installed("--help", cwd=tmp_path)
    assert listed.returncode == 0, listed.stderr
    assert all(len(line) <= 80 for line in listed.stdout.splitlines())  # a longer sentence goes on under itself
    whole = re.sub(r"\n {5,}", " ", listed.stdout)
    lines = dict(line.split(maxsplit=1) for line in whole.splitlines() if line.startswith("  "))
    assert lines.keys() == names
    assert all(text.endswith(".") or ":" in text for text in lines.values())
    wrong = installed("tabel1", cwd=tmp_path)
    said = "error: unknown command 'tabel1'; did you mean 'table1'? See --help.\n"
    assert (wrong.returncode, wrong.stdout, wrong.stderr) == (2, "", said)
    assert installed("--version", cwd=tmp_path).stdout == f"fedcommons {PROJECT['version']}\n"
    for name in ("run", "communication-saved"):
        helped = installed(name, "--help", cwd=tmp_path)
        assert helped.returncode == 0, helped.stderr
        assert "usage: " in helped.stdout
    refused = installed("run", "--client.lr", "-1", cwd=tmp_path)
    assert (refused.returncode, refused.stderr) == (2, "error: client.lr must lie in (0, 1e38], got -1.\n")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.ray  # it needs none, but half a minute
def test_the_installed_wheel_runs_an_experiment_and_prices_a_table(
    installed: Callable[..., Any], tmp_path: Path
) -> None:
    done = installed("run", "--preset", "smoke", "--wandb", "off", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["rounds"] == 3
    priced = installed("table1", "--preset", "smoke", "--dry-run", "--wandb", "off", cwd=tmp_path)
    assert priced.returncode == 0, priced.stderr
    assert "In all about" in priced.stdout
    published = "fedcommons_sweeps/papers/fedssyn/published/fedssyn_table1_rounds.csv"
    saved = installed("communication_saved", "--from", str(installed.target / published), cwd=tmp_path)
    assert "| cifar10" in saved.stdout.lower(), saved.stderr


def test_in_a_clone_the_command_runs_the_sweeps_of_the_clone() -> None:
    assert command.folder() == ROOT / "sweeps"


def test_how_to_report_a_weakness_is_said() -> None:
    said = (ROOT / "SECURITY.md").read_text()
    assert "private vulnerability report" in said
    assert ".".join(PROJECT["version"].split(".")[:2]) in said  # which versions get fixes
    assert not re.search(r"[\w.]+@[\w.]+\.\w", said)
