"""Names that never change: of runs, central models, generators and images; and the noise of private training.

``names.json`` has one hash for each command, over all its names. A new field, component or preset changes none.
"""

import csv
import json
from collections.abc import Callable
from functools import cache
from hashlib import sha256
from pathlib import Path
from types import ModuleType
from typing import Any, get_args

import pytest
import yaml
from sweep_cells import cells_of

from fedcommons.artifacts import key_of
from fedcommons.config import parts
from fedcommons.config.fields import Field
from fedcommons.config.flat import deciding, own_fields, to_dict
from fedcommons.config.parts import KINDS
from fedcommons.runs import build, worker
from fedcommons.sweeping.sweep import Trial

HERE = Path(__file__).parent
NAMES = json.loads((HERE / "names.json").read_text())
RESULTS = HERE.parent / "docs" / "results"
PUBLISHED = {
    "table1_small_digits": "table1 --seeds 0,1,2",
    "table1_small_digits_rates": "table1 --seeds 0,1,2 --alphas 0.01 --lrs 0.02,0.04,0.1,0.25",
    "figure3_small_digits": "figure3 --seeds 0,1,2",
    "disclosure_digits": "disclosure --seeds 0,1,2",
    "feddm_digits": "feddm",
    "table2_digits": "table2 --seeds 0,1,2 --rates 0.1 --image-rates 0.1",
    "feddm_mnist": "feddm --dataset mnist --alphas 0.01,0.1 --ipcs= --radii= --sigmas 3 --rates= --image-rates=",
    "feddpms_digits": "feddpms --seeds 0,1,2 --alphas 0.5,0.1 --lrs 0.005,0.01,0.02 --sigmas= --quotas=",
    "feddpms_fmnist": "feddpms --dataset fmnist --seeds 0,1,2 --sigmas= --quotas=",
}
"""Result pages whose CSV names its runs, and the command of each."""


@pytest.fixture(scope="module")
def script(sweeps: Callable[[str], ModuleType]) -> Callable[[str], ModuleType]:
    return cache(sweeps)


def facts(one: Trial) -> list[str]:
    """Return a run's name, the hash of its config.yaml and the beginning of the key of its noise."""
    written = yaml.safe_dump(to_dict(one.config), sort_keys=False)
    return [one.name, sha256(written.encode()).hexdigest()[:12], f"{worker.noise_key(one.config):032x}"[:12]]


def hashed(value: object) -> str:
    return sha256(json.dumps(value).encode()).hexdigest()[:12]


@pytest.mark.parametrize("line", NAMES["runs"])
def test_a_run_has_the_name_the_config_and_the_noise_that_it_had(
    script: Callable[[str], ModuleType], line: str
) -> None:
    name, *argv = line.split()
    now = [facts(one) for one in cells_of(script(name), argv)]
    assert hashed(now) == NAMES["runs"][line], now


def test_the_fields_that_decide_a_name(script: Callable[[str], ModuleType]) -> None:
    """Only what is not at its default, in the order of the fields; the name ends with the beginning of their hash."""
    argv = ["--preset", "smoke", "--alphas", "0.01", "--algorithms", "fedavg", "--settings", "real,shuffled_synthetic"]
    real, pool = cells_of(script("table1"), argv)
    assert [real.name, pool.name] == [
        "fedavg-real-alpha0.01-N4-C1-lr0.1-seed0-ebf55b",
        "fedavg-shuffled_synthetic-alpha0.01-N4-C1-lr0.1-seed0-7188cd",
    ]
    assert list(deciding(real.config).items()) == [
        ("target", 0.2), ("data.limit", 200), ("partition.n_clients", 4), ("partition.alpha", 0.01),
        ("client.lr", 0.1), ("client.epochs", 5), ("client.batch_size", 10), ("client.onednn", False),
        ("federation.rounds", 3), ("measure.every", 3),
    ]  # fmt: skip
    assert key_of(deciding(real.config))[:6] == "ebf55b"


@pytest.mark.parametrize("page", PUBLISHED)
def test_a_published_run_is_found_by_its_command(script: Callable[[str], ModuleType], page: str) -> None:
    name, *argv = PUBLISHED[page].split()
    names = {one.name for one in cells_of(script(name), argv)}
    rows = csv.DictReader((RESULTS / f"{page}.csv").read_text().splitlines())
    runs = {row["run_dir"] for row in rows if not row["run_dir"].startswith("central_")}
    assert runs
    assert runs - names == set()


@pytest.mark.parametrize("line", NAMES["centrals"])
def test_a_central_model_has_the_name_that_it_had(script: Callable[[str], ModuleType], line: str) -> None:
    module = script("figure3")
    options = module.arguments(line.split()[1:])
    now = [one.name for one in module.central_lines(module.grid(options), options)]
    assert hashed(now) == NAMES["centrals"][line], now


@pytest.mark.parametrize("line", NAMES["artifacts"])
def test_generators_and_images_have_the_keys_that_they_had(script: Callable[[str], ModuleType], line: str) -> None:
    name, *argv = line.split()
    now = [artifact_keys(one) for one in cells_of(script(name), argv) if one.config.generator]
    assert hashed(now) == NAMES["artifacts"][line], now


def artifact_keys(one: Trial) -> list[str]:
    """Return keys of the first and the last client's artifacts, and of the noise of a private generator."""
    needs = build.prepare(one.config).needs
    keys = [
        key_of(facts) for n in (needs[0], needs[-1]) for facts in (n.course_facts, n.generator_facts, n.images_facts)
    ]
    if one.config.generator and one.config.generator.name == "private_ddpm":
        keys.append(f"{needs[0].noise.source.facts:032x}")
    return [key[:12] for key in keys]


def fields_of(kind: str) -> dict[str, dict[str, list[Any]]]:
    """Return default, range and types of every field, by section or by component of a kind."""
    of: dict[str, dict[str, list[Any]]] = {}
    if kind != "sections":
        known = KINDS[kind].known
        return {one: {n: described(f) for n, f in parts.constants(kind, one).items()} for one in known}
    for name, field in own_fields().items():
        section, _, leaf = name.partition(".") if "." in name else ("experiment", "", name)
        of.setdefault(section, {})[leaf] = described(field)
    return of


def described(field: Field) -> list[Any]:
    types = [getattr(one, "__name__", str(one)) for one in (get_args(field.hint) or (field.hint,))]
    return [repr(field.default), field.allowed, types]


@pytest.mark.parametrize("kind", NAMES["fields"])
def test_fields_types_ranges_and_defaults_are_what_they_were(kind: str) -> None:
    """Another default renames runs; without a field a config cannot be read. A new field may come."""
    now = fields_of(kind)
    for component, words in NAMES["fields"][kind].items():
        *names, was = words.split()
        assert set(names) <= now[component].keys()
        assert hashed([now[component][name] for name in names]) == was, (component, now[component])
