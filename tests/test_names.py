"""Names: of runs, central models, generators and images, and the noise of private training. They never change.

``names.json`` holds them as they were; whoever has runs or generators in a folder finds them by these names. A new
field, part or preset changes none of them.
"""

import csv
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

from fedcommons.artifacts import key_of
from fedcommons.config import parts
from fedcommons.config.fields import Field
from fedcommons.config.flat import deciding, own_fields, to_dict
from fedcommons.config.parts import KINDS
from fedcommons.runs import build, worker
from fedcommons.sweeping.sweep import Trial, cell
from papers.fedssyn import sizes

HERE = Path(__file__).parent
NAMES = json.loads((HERE / "names.json").read_text())
RESULTS = HERE.parent / "docs" / "results"
PUBLISHED = {
    "table1_small_digits": "table1 --seeds 0,1,2",
    "table1_small_digits_rates": "table1 --seeds 0,1,2 --alphas 0.01 --lrs 0.02,0.04,0.1,0.25",
    "pool_alone": "table1 --seeds 0,1,2 --alphas 0.01 --lrs 0.02,0.04,0.1,0.25 --algorithms one_shot --settings "
    "server_synthetic + table1 --dataset mnist --alphas 0.01 --algorithms one_shot --settings server_synthetic "
    "--data.limit null --generator.steps 400 --generator.sampling_steps 15 --generator.prediction v_prediction "
    "--client.epochs 1 --client.batch_size 32 --federation.rounds 10 --lrs 0.03,0.1,0.3 --target 0.9 --seeds 0",
    "table1_small_cifar10": "table1 --dataset cifar10 --alphas 0.01 --algorithms fedavg,scaffold --data.limit 12000 "
    "--generator.steps 500 --generator.prediction v_prediction --client.epochs 2 --client.batch_size 32 "
    "--federation.rounds 25 --lrs 0.03,0.06,0.12 --target 0.3 --seeds 0,1,2",
    "table1_mnist": "table1 --dataset mnist --alphas 0.01 --data.limit null --generator.steps 400 "
    "--generator.sampling_steps 15 --generator.prediction v_prediction --client.epochs 1 --client.batch_size 32 "
    "--federation.rounds 10 --lrs 0.03,0.1,0.3 --target 0.9",
    "table1_fmnist": "table1 --dataset fmnist --alphas 0.01 --data.limit null --generator.steps 400 "
    "--generator.sampling_steps 15 --generator.prediction v_prediction --client.epochs 1 --client.batch_size 32 "
    "--federation.rounds 10 --lrs 0.01,0.03,0.1 --target 0.7 + table1 --dataset fmnist --alphas 0.01 "
    "--algorithms fedavg --settings real --data.limit null --client.epochs 1 --client.batch_size 32 "
    "--federation.rounds 10 --lrs 0.1,0.3 --target 0.7",
    "figure3_small_digits": "figure3 --seeds 0,1,2",
    "figure3_fmnist": "figure3 --dataset fmnist --data.limit null --generator.steps 400 --generator.sampling_steps 15 "
    "--generator.prediction v_prediction --client.epochs 1 --client.batch_size 32 --federation.rounds 10 --alphas 0.01 "
    "--client.lr 0.1 --seeds 0,1",
    "disclosure_digits": "disclosure --seeds 0,1,2",
    "disclosure_digits_epsilon": "disclosure --alphas 0.1 --federation.rounds 15 --settings real,raw_copies "
    "--shares 0.05,0.2 --seeds 0,1,2 + private_fedssyn --federation.rounds 15 --checkpoints 0.5,1 --seeds 0,1,2",
    "disclosure_digits_merf": "disclosure --alphas 0.1 --federation.rounds 15 --settings real,raw_copies,merf "
    "--shares 0.05,0.2 --epsilons 1,10 --seeds 0,1,2 + disclosure --alphas 0.1 --federation.rounds 15 "
    "--settings merf --epsilons 1,10 --merf.noise summed --seeds 0,1,2",
    "feddm_digits": "feddm",
    "feddm_digits_one_seed": "feddm --partition.n_clients 50 --feddm.least 3 --alphas 0.5,5 --ipcs= --radii= --sigmas= "
    "--algorithms feddm,fedavg,scaffold --seeds 0 --rates= --image-rates= "
    "+ feddm --data.name docs/digits16.py:digits16 --data.limit 200 --partition.n_clients 4 --federation.rounds 2 "
    "--alphas 0.5 --algorithms feddm,fedavg --ipcs= --radii= --sigmas= --seeds 0 --rates= --image-rates= --feddm.ipc 2 "
    "--feddm.iterations 3 --feddm.server_epochs 5 --feddm.least 5 --client.epochs 2 --client.lr 0.1 "
    "--model.name resnet18 "
    "+ feddm --alphas 0.1 --algorithms feddm --ipcs= --radii= --seeds 0 --rates= --image-rates= --client.lr 0.1 "
    "--noisy feddm,fedavg,fedprox,fednova,scaffold",
    "table2_digits": "table2 --seeds 0,1,2 --rates 0.1 --image-rates 0.1",
    "feddm_mnist": "feddm --dataset mnist --alphas 0.01,0.1 --ipcs= --radii= --sigmas 3 --rates= --image-rates=",
    "feddpms_digits": "feddpms --seeds 0,1,2 --alphas 0.5,0.1 --lrs 0.005,0.01,0.02 --sigmas= --quotas=",
    "feddpms_fmnist": "feddpms --dataset fmnist --seeds 0,1,2 --sigmas= --quotas=",
}
"""Pages of results whose CSV names its runs, and their commands; +: runs of several sweeps."""


@pytest.fixture(scope="module")
def script(sweeps: Callable[[str], ModuleType]) -> Callable[[str], ModuleType]:
    """The scripts, each loaded once."""
    return cache(sweeps)


def cells(module: ModuleType, argv: Sequence[str]) -> list[Trial]:
    """The runs of a sweep; of one that has none, its experiments."""
    name, options = module.__name__, module.arguments(argv)
    if name == "tune":
        return module.cells(options)[0]
    if name in ("feddm", "private_fedssyn", "dsprites", "table2", "sensitivity", "fedcvae", "replicate"):
        return [entry.cell for entry in module.entries(options)]
    if name == "feddpms":
        return [*chain.from_iterable(module.grid(options).values())]
    if name == "convergence_parameters":
        return [*chain(*module.figure_a7(options).values(), *module.figure_a8(options).values())]
    if name == "advise":
        return [*chain.from_iterable(module.cells(options).values())]
    if name == "private_sizes":
        return [cell(config, {}) for config in sizes.configs(options, 129, 0).values()]
    return [cell(options.config, {})] if name in ("audit_pool", "quality") else module.grid(options)


def facts(one: Trial) -> list[str]:
    """A run's name, the digest of its config.yaml, the beginning of the key of its noise."""
    written = yaml.safe_dump(to_dict(one.config), sort_keys=False)
    return [one.name, sha256(written.encode()).hexdigest()[:12], f"{worker.noise_key(one.config):032x}"[:12]]


@pytest.mark.parametrize("line", NAMES["runs"], ids=str)
def test_a_run_has_the_name_the_config_and_the_noise_that_it_had(
    script: Callable[[str], ModuleType], line: str
) -> None:
    name, *argv = line.split()
    assert [facts(one) for one in cells(script(name), argv)] == NAMES["runs"][line]


@pytest.mark.parametrize("line", NAMES["decide"], ids=str)
def test_what_a_run_is_named_after(script: Callable[[str], ModuleType], line: str) -> None:
    """A run's name is a hash of these, so that they tell which field has changed it."""
    name, *argv = line.split()
    found = [deciding(one.config) for one in cells(script(name), argv)]
    assert json.loads(json.dumps(found)) == NAMES["decide"][line]


@pytest.mark.parametrize("page", PUBLISHED)
def test_a_published_run_is_found_by_its_command(script: Callable[[str], ModuleType], page: str) -> None:
    lines = [line.split() for line in PUBLISHED[page].split(" + ")]
    found = {one.name for name, *argv in lines for one in cells(script(name), argv)}
    rows = csv.DictReader((RESULTS / f"{page}.csv").read_text().splitlines())
    runs = {row["run_dir"] for row in rows if not row["run_dir"].startswith("central_")}  # no runs of a federation
    assert runs
    assert runs - found == set()


def test_every_page_that_names_its_runs_is_looked_at() -> None:
    named = {path.stem for path in RESULTS.glob("*.csv") if "run_dir" in path.read_text().partition("\n")[0]}
    assert named == set(PUBLISHED)


@pytest.mark.parametrize("line", NAMES["centrals"], ids=str)
def test_a_central_model_has_the_name_that_it_had(script: Callable[[str], ModuleType], line: str) -> None:
    module = script("figure3")
    options = module.arguments(line.split()[1:])
    assert [one.name for one in module.central_lines(module.grid(options), options)] == NAMES["centrals"][line]


@pytest.mark.parametrize("line", NAMES["artifacts"], ids=str)
def test_generators_and_images_are_found_again(script: Callable[[str], ModuleType], line: str) -> None:
    """Of each run with one: the first client's training, its weights after these epochs, its images; and the noise."""
    name, *argv = line.split()
    assert [made(one) for one in cells(script(name), argv) if one.config.generator] == NAMES["artifacts"][line]


def made(one: Trial) -> list[str]:
    """Keys of the first and the last client's artifacts, and of the noise of a private generator."""
    needs = build.prepare(one.config).needs
    found = [
        key_of(facts) for n in (needs[0], needs[-1]) for facts in (n.course_facts, n.generator_facts, n.images_facts)
    ]
    if one.config.generator and one.config.generator.name == "private_ddpm":
        # nothing public tells this key, and images made with other noise would stand under the same name
        found.append(f"{needs[0].noise.source.facts:032x}")
    return [key[:12] for key in found]


def test_fields_types_ranges_and_defaults_are_what_they_were() -> None:
    """A default that changes renames runs, and a field that goes makes their configs unreadable; new ones may come."""
    now = {"": {name: told(field) for name, field in own_fields().items()}}
    for kind, k in KINDS.items():
        for name in k.known:
            now[f"{kind} {name}"] = {n: told(field) for n, field in parts.constants(kind, name).items()}
    now = json.loads(json.dumps(now))
    kept = {part: {n: now.get(part, {}).get(n) for n in fields} for part, fields in NAMES["fields"].items()}
    assert kept == NAMES["fields"]


def told(field: Field) -> list[Any]:
    """Default, range and types of a field; 1 is not 1.0 there."""
    types = [getattr(one, "__name__", str(one)) for one in (get_args(field.hint) or (field.hint,))]
    return [repr(field.default), field.allowed, types]
