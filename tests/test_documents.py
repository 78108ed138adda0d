"""Licence, citation, changelog and the links between the documents."""

import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from hashlib import sha256
from pathlib import Path

import yaml

import fedcommons

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
APACHE_2 = "cfc7749b96f63bd31c3c42b5c471bf756814053e847c10f3eb003417bc523d30"
"""SHA-256 of https://www.apache.org/licenses/LICENSE-2.0.txt."""


def test_wheel_and_source_hold_the_licences_exact_text(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-m", "hatchling", "build", "-d", tmp_path], cwd=ROOT, check=True, timeout=100)
    (wheel,), (source,) = tmp_path.glob("*.whl"), tmp_path.glob("*.tar.gz")
    with zipfile.ZipFile(wheel) as files:
        assert "fedcommons/py.typed" in files.namelist()
        (name,) = [name for name in files.namelist() if name.endswith("/LICENSE")]
        assert sha256(files.read(name)).hexdigest() == APACHE_2
        (name,) = [name for name in files.namelist() if name.endswith("/METADATA")]
        assert b"License-Expression: Apache-2.0" in files.read(name)
    with tarfile.open(source) as files:
        held = {name.partition("/")[2] for name in files.getnames()}
    assert {"LICENSE", "CITATION.cff", "CHANGELOG.md", "README.md"} <= held


def test_citation_and_changelog_are_of_this_version() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert {"cff-version", "message", "title", "authors"} <= citation.keys()  # what CFF 1.2.0 requires
    assert citation["cff-version"] == "1.2.0"
    assert (citation["version"], citation["license"]) == (PROJECT["version"], PROJECT["license"])
    assert [author["name"] for author in citation["authors"]] == [author["name"] for author in PROJECT["authors"]]
    for reference in citation["references"]:
        assert {"type", "title", "authors"} <= reference.keys()
    sections = re.findall(r"^## (.*)$", (ROOT / "CHANGELOG.md").read_text(), re.M)
    assert sections[0] == "[Unreleased]"
    assert re.fullmatch(rf"\[{PROJECT['version']}\] - \d{{4}}-\d\d-\d\d", sections[1])
    assert fedcommons.__version__ == PROJECT["version"]


def test_no_link_or_docstring_names_a_page_that_is_not_there() -> None:
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    for page in pages:
        for link in re.findall(r"\]\(([^)#\s]+)", page.read_text()):
            assert "://" in link or (page.parent / link).exists(), f"{page.name}: {link}"
    for folder in ("platform", "lightning_modules"):
        for path in (ROOT / folder).rglob("*.py"):
            named = set(re.findall(r'(?<!/ ")\b\w+\.md\b', path.read_text()))  # what a sweep writes is no page of ours
            assert named <= {page.name for page in pages}, path
