"""Write fedcommons.cdx.json, the CycloneDX list of what an installation of the package brings with it.

stdin: the pinned packages of the running package, without those of its development, as ``make lock`` resolves them.
It has no time and no random number in it, so that two builds of the wheel that carries it are equal.
"""

import json
import re
import sys
import tomllib
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent


def normal(name: str) -> str:
    """A package's name as PyPI writes it."""
    return re.sub("[-_.]+", "-", name).lower()


def component(pinned: str) -> dict[str, Any]:
    """One line of a lock file, such as ``colorama==0.4.6 ; sys_platform == 'win32'``."""
    package, _, marker = (part.strip() for part in pinned.partition(" ;"))
    name, _, version = package.partition("==")
    purl = f"pkg:pypi/{normal(name)}@{version}"
    found: dict[str, Any] = {"type": "library", "bom-ref": purl, "name": normal(name), "version": version, "purl": purl}
    return {**found, "scope": "optional", "description": f"where {marker}"} if marker else found


def sbom(project: dict[str, Any], lines: list[str]) -> dict[str, Any]:
    """The list, as CycloneDX 1.6 has it.

    project: of pyproject.toml. lines: of a lock file.
    """
    components = [component(line) for line in lines if re.match(r"\w", line)]
    root = f"pkg:pypi/{project['name']}@{project['version']}"
    direct = {normal(re.split(r"[^\w.-]", line, maxsplit=1)[0]) for line in project["dependencies"]}
    if missing := direct - {one["name"] for one in components}:
        raise SystemExit(f"the lock has no {', '.join(sorted(missing))}")
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {
            "lifecycles": [{"phase": "pre-build"}],
            "component": {
                "type": "library", "bom-ref": root, "name": project["name"], "version": project["version"],
                "purl": root, "licenses": [{"license": {"id": project["license"]}}],
            },
        },
        "components": components,
        "dependencies": [{"ref": root, "dependsOn": [one["purl"] for one in components if one["name"] in direct]}],
    }  # fmt: skip


if __name__ == "__main__":
    told = tomllib.loads((HERE.parent / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    (HERE / "fedcommons.cdx.json").write_text(
        json.dumps(sbom(told, sys.stdin.readlines()), indent=1) + "\n", encoding="utf-8"
    )
