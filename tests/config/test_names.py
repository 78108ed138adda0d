"""Names that never change: of runs, central models, generators and images; and the noise of private training.

``names.json`` has one hash for each command, over all its names. A new field, component or preset changes none.
"""

import json
from collections.abc import Callable, Sequence
from functools import cache
from hashlib import sha256
from itertools import chain
from pathlib import Path
from types import ModuleType
from typing import Any, get_args

import pytest
import yaml

from fedcommons.config import registry
from fedcommons.config.dotted import common_fields, to_dict
from fedcommons.config.fields import Field
from fedcommons.config.registry import KINDS
from fedcommons.runs import build
from fedcommons.storage.artifact_store import key_of
from fedcommons.tune.sweep import Trial, cell
from papers.fedssyn import sizes

HERE = Path(__file__).parents[1]
NAMES = json.loads((HERE / "names.json").read_text())


def cells_of(module: ModuleType, argv: Sequence[str]) -> list[Trial]:
    """Return the runs of a sweep; of a script without runs, its experiments."""
    name, options = module.__name__, module.arguments(argv)
    if name == "tune":
        return module.cells(options)[0]
    if hasattr(module, "entries"):
        cells = [
            entry.cell for entry in module.entries(options)
        ]  # the server alone in table1 is younger than names.json
        return [trial for trial in cells if name != "table1" or trial.config.algorithm != "one_shot"]
    if name == "convergence_parameters":
        return [*chain(*module.figure_a7(options).values(), *module.figure_a8(options).values())]
    if name == "private_sizes":
        return [cell(config, {}) for config in sizes.configs(options, 129, 0).values()]
    return [cell(options.config, {})] if name in ("audit_pool", "quality") else module.grid(options)


@pytest.fixture(scope="module")
def script(sweeps: Callable[[str], ModuleType]) -> Callable[[str], ModuleType]:
    return cache(sweeps)


def facts(trial: Trial) -> list[str]:
    """Return a run's name, the hash of its config.yaml and the beginning of the key of its noise."""
    fields = to_dict(trial.config)
    del fields["federation"]["transport"], fields["data"]["split"], fields["data"]["public"]  # younger
    del fields["evaluate"]["new_clients"], fields["evaluate"]["adapt_epochs"]  # younger than names.json
    del fields["tracking"]["notes"], fields["tracking"]["model"], fields["tracking"]["system"]  # younger too
    del fields["model"]["weights_map"], fields["model"]["weights_strict"], fields["communication"]
    del fields["federation"]["sampling"], fields["federation"]["aggregation"], fields["attack"]
    fields["dp"] = {name: value for name, value in fields["dp"].items() if not name.startswith("central")}
    fields["federation"]["gpus_per_actor"] = 1.0  # the default of then
    written = yaml.safe_dump(fields, sort_keys=False)
    return [trial.name, sha256(written.encode()).hexdigest()[:12], f"{build.noise_key(trial.config):032x}"[:12]]


def hashed(value: object) -> str:
    return sha256(json.dumps(value).encode()).hexdigest()[:12]


def runs(script: Callable[[str], ModuleType], name: str, argv: list[str]) -> list[Any]:
    return [facts(trial) for trial in cells_of(script(name), argv)]


def centrals(script: Callable[[str], ModuleType], name: str, argv: list[str]) -> list[Any]:
    """Return the names of the central models of a sweep."""
    module, options = script(name), script(name).arguments(argv)
    cells = module.entries(options) if hasattr(module, "entries") else module.grid(options)
    return [trial.name for trial in module.central_lines(cells, options)]


def artifacts(script: Callable[[str], ModuleType], name: str, argv: list[str]) -> list[Any]:
    return [artifact_keys(trial) for trial in cells_of(script(name), argv) if trial.config.generator]


LINES = [(group.__name__, line) for group in (runs, centrals, artifacts) for line in NAMES[group.__name__]]


@pytest.mark.parametrize(("group", "line"), LINES)
def test_names_keys_configs_and_noise_are_as_before(script: Callable[[str], ModuleType], group: str, line: str) -> None:
    name, *argv = line.split()
    now = {"runs": runs, "centrals": centrals, "artifacts": artifacts}[group](script, name, argv)
    assert hashed(now) == NAMES[group][line], now


def artifact_keys(trial: Trial) -> list[str]:
    """Return keys of the first and the last client's artifacts, and of the noise of a private generator."""
    needs = build.build(trial.config).requests
    keys = [key_of(f) for n in (needs[0], needs[-1]) for f in (n.course_facts, n.generator_facts, n.images_facts)]
    if trial.config.generator and trial.config.generator.name == "private_ddpm":
        keys.append(f"{needs[0].noise.source.facts:032x}")
    return [key[:12] for key in keys]


def fields_of(kind: str) -> dict[str, dict[str, list[Any]]]:
    """Return default, range and types of every field, by section or by component of a kind."""
    result: dict[str, dict[str, list[Any]]] = {}
    if kind != "sections":
        components = KINDS[kind].components
        return {name: {n: described(f) for n, f in registry.constants(kind, name).items()} for name in components}
    for name, field in common_fields().items():
        section, _, leaf = name.partition(".") if "." in name else ("experiment", "", name)
        result.setdefault(section, {})[leaf] = described(field)
    return result


def described(field: Field) -> list[Any]:
    types = [getattr(kind, "__name__", str(kind)) for kind in (get_args(field.hint) or (field.hint,))]
    return [repr(field.default), field.allowed, types]


@pytest.mark.parametrize("kind", NAMES["fields"])
def test_fields_types_ranges_and_defaults_are_what_they_were(kind: str) -> None:
    """Another default renames runs; without a field a config cannot be read. A new field may come."""
    now = fields_of(kind)
    for component, words in NAMES["fields"][kind].items():
        *names, was = words.split()
        assert set(names) <= now[component].keys()
        assert hashed([now[component][name] for name in names]) == was, (component, now[component])
