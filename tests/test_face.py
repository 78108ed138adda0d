"""``from fedcommons import ...``: every name is there, typed and told of, and documented programs need no more."""

import ast
import json
import re
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import assert_type

import pytest
import torch

import fedcommons
from fedcommons import Facts, Flat, Message, UserError, flatten, seed_for, zeros_like

ROOT = Path(__file__).parent.parent
PAGES = ("CONTRIBUTING.md", "docs/own_parts.md", "README.md")


@pytest.mark.parametrize("name", fedcommons.__all__)
def test_a_name_can_be_imported_and_is_documented(name: str) -> None:
    found = getattr(fedcommons, name)
    assert callable(found)
    assert re.search(rf"\b{name}\b", fedcommons.__doc__ or "")
    if isinstance(found, type):
        assert found.__doc__
        assert not found.__doc__.startswith(f"{name}(")  # dataclass writes that where there is nothing


def test_type_checkers_see_the_names_where_they_stand() -> None:
    tree = ast.parse(Path(fedcommons.__file__).read_text(encoding="utf-8"))
    (block,) = [node for node in tree.body if isinstance(node, ast.If)]
    seen = {
        (alias.name, node.module) for node in block.body if isinstance(node, ast.ImportFrom) for alias in node.names
    }
    assert sorted(name for name, _ in seen) == sorted(fedcommons.__all__)
    for name, module in seen:
        assert getattr(import_module(str(module)), name) is getattr(fedcommons, name)


def test_names_have_their_types() -> None:
    """``make lint`` looks at this too: ``assert_type`` refuses a name whose type pyright does not know."""
    x = assert_type(flatten({"w": torch.ones(2)}), Flat)
    assert_type(zeros_like(x), Flat)
    assert_type(Message({"model": x}).nbytes, int)
    assert_type(Facts(2, [1, 2], 3).total_weight, float)
    assert_type(seed_for(1, "a"), int)
    assert issubclass(UserError, Exception)


def programs() -> Iterator[tuple[str, str]]:
    """The documented programs."""
    for page in PAGES:
        for number, text in enumerate(re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.S)):
            yield f"{page} {number}", text
    cells = json.loads((ROOT / "docs" / "notebook.ipynb").read_text())["cells"]
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    yield "notebook", "\n".join(line for line in "\n".join(code).splitlines() if not line.startswith(("%", "!")))
    for path in sorted((ROOT / "examples").glob("*.py")):
        yield path.name, path.read_text()


@pytest.mark.parametrize(("name", "text"), [pytest.param(*program, id=program[0]) for program in programs()])
def test_documented_programs_import_from_the_package_alone(name: str, text: str) -> None:
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            assert not [alias.name for alias in node.names if alias.name.partition(".")[0] == "fedcommons"]
        elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "fedcommons":
            assert node.module == "fedcommons"
            assert {alias.name for alias in node.names} <= set(fedcommons.__all__)
