"""The house, counted: its rooms, floors and arrows, and how far the config travels.

A room is a folder of code (``sweeps/papers`` is one room) or a loose file beside the package's folders, ``__init__.py``
left out, which only names what stands elsewhere. An arrow is an ordered pair of rooms with an import between them. A
room's floor is the longest chain of arrows below it, itself included. The strings of ``config/parts.py`` that name the
package's parts are no imports: they are the one exception, and are listed.

A stay of the config is a function that takes the experiment, a section of it, its flat form, or what holds it
(``Prepared``, ``Assembled``), in a file on the way from ``runs/experiment.py: run`` to the algorithm.

Run as a script it prints what it counts.
"""

import ast
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

from fedcommons.config.parts import KINDS

ROOT = Path(__file__).parent.parent
HOLDERS = {"Experiment", "Data", "Partition", "Generator", "Sharing", "Model", "Client", "Federation", "Straggler",
           "DP", "Evaluate", "Measure", "Tracking", "Prepared", "Assembled"}  # fmt: skip
FLAT = {"fields", "flat", "values", "config"}
"""What a mapping of dotted names to values is called."""
BESIDE = ("sweeping/", "reports/", "config/cli", "config/options", "config/presets", "config/search_space",
          "runs/replay", "runs/probe", "runs/central", "runs/cost", "runs/counting", "runs/gpu_need", "core/",
          "federation/", "prices/")  # fmt: skip
"""Files that no run passes on its way to the algorithm, or whose mappings are no config."""


def files() -> Iterator[tuple[Path, tuple[str, ...]]]:
    """Every file of code and its dotted name."""
    for base in (ROOT / "platform" / "fedcommons", ROOT / "lightning_modules", ROOT / "sweeps"):
        above = ROOT / "platform" if base.parent.name == "platform" else ROOT
        for path in sorted(base.rglob("*.py")):
            parts = path.relative_to(above).with_suffix("").parts
            yield path, parts[:-1] if parts[-1] == "__init__" else parts


def room(name: tuple[str, ...], is_folder: bool) -> str | None:
    """The room that a module stands in; None for the package's ``__init__.py``."""
    if name[:2] == ("sweeps", "papers"):
        return "sweeps/papers"
    inside = name[1:] if name[0] == "fedcommons" else name
    if not inside:
        return None
    return "/".join(inside if is_folder or (name[0] == "fedcommons" and len(inside) == 1) else inside[:-1])


def arrows() -> dict[str, set[str]]:
    """Each room, and the rooms that it imports from."""
    rooms = {name: room(name, path.name == "__init__.py") for path, name in files()}
    rooms |= {name[1:]: where for name, where in rooms.items() if name[0] == "sweeps" and len(name) > 1}
    found: dict[str, set[str]] = {where: set() for where in rooms.values() if where}
    for path, name in files():
        here = rooms[name]
        for node in ast.walk(ast.parse(path.read_text())) if here else ():
            imports = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                imports = [f"{node.module}.{alias.name}" for alias in node.names]
            for text in imports:
                steps = tuple(text.split("."))
                there = next((rooms[steps[:end]] for end in range(len(steps), 0, -1) if steps[:end] in rooms), None)
                if there and here and there != here:
                    found[here].add(there)
    return found


def floors(of: dict[str, set[str]]) -> int:
    """The number of floors; a ``CycleError`` where an arrow runs back."""
    list(TopologicalSorter(of).static_order())

    @cache
    def floor(one: str) -> int:
        return 1 + max((floor(other) for other in of[one]), default=0)

    return max(map(floor, of))


def stays() -> dict[str, list[str]]:
    """The functions on the config's way, by file."""
    found: dict[str, list[str]] = defaultdict(list)
    for path, name in files():
        where = "/".join(name[1:])
        if name[0] != "fedcommons" or where.startswith(BESIDE):
            continue
        tree = ast.parse(path.read_text())
        imported = {
            alias.asname or alias.name
            for node in ast.walk(tree)
            if isinstance(node, ast.ImportFrom) and ("config" in (node.module or "") or "runs" in (node.module or ""))
            for alias in node.names
        } | {node.name for node in tree.body if isinstance(node, ast.ClassDef) and "config/" in f"{where}/"}
        imported |= {node.name for node in tree.body if isinstance(node, ast.ClassDef)} & {"Prepared", "Assembled"}
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef):
                given = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
                types = {a.arg: ast.unparse(a.annotation) for a in given if a.annotation}
                held = any(set(_names(text)) & HOLDERS & imported for text in types.values())
                if held or any(arg in FLAT and "Mapping[str, Any]" in text for arg, text in types.items()):
                    found[where].append(node.name)
    return found


def _names(text: str) -> list[str]:
    return [node.id for node in ast.walk(ast.parse(text.strip("'\""))) if isinstance(node, ast.Name)]


def test_the_house_is_no_larger_and_no_arrow_runs_back() -> None:
    of = arrows()
    assert len(of) <= 27
    assert sum(map(len, of.values())) <= 149
    assert floors(of) <= 12


def test_the_config_stays_where_it_is_unpacked() -> None:
    found = stays()
    assert sum(map(len, found.values())) <= 70
    assert len(found) <= 27
    rooms = {where.partition("/")[0] for where in found}
    assert rooms <= {"config", "runs", "tracking", "algorithms", "generators", "sharing"}  # the last three refuse


def test_the_package_names_parts_by_strings_in_one_file_only() -> None:
    named = {where.partition(":")[0] for kind in KINDS.values() for where in kind.known.values()}
    for path, name in files():
        if name[0] == "fedcommons" and "/".join(name[1:]) != "config/parts":
            texts = {n.value for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Constant)}
            assert not named & texts, path


if __name__ == "__main__":
    of, held = arrows(), stays()
    print(f"{len(of)} rooms, {sum(map(len, of.values()))} arrows, {floors(of)} floors")
    print(f"config: {sum(map(len, held.values()))} stays, {len(held)} files")
    for where, names in held.items():
        print(f"  {where}: {', '.join(names)}")
