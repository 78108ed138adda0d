"""Presets of Table 2 of Fedssyn: its methods, config fields, and the learning rates to try."""

from collections.abc import Mapping
from typing import Any

from fedcommons.config import presets

METHODS: Mapping[str, Mapping[str, str]] = {
    "fedssyn": {"algorithm": "fedavg", "sharing.setting": "shuffled_synthetic"},
    "fedgen": {"algorithm": "fedgen", "sharing.setting": "real"},
    "dense": {"algorithm": "dense", "sharing.setting": "real"},
    "feddm": {"algorithm": "feddm", "sharing.setting": "real"},
    "fedavg": {"algorithm": "fedavg", "sharing.setting": "real"},
}
"""Config fields of the rows, in the table's order; Fedssyn is FedAvg on real and shuffled synthetic images."""

ALGORITHMS = ",".join(dict.fromkeys(constants["algorithm"] for constants in METHODS.values()))

_EVERY: dict[str, Any] = {"measure.every": 0, "dense.warmup_rounds": 10}
_DIGITS = {"fedgen.noise_size": 32, "fedgen.hidden": 64, "feddm.ipc": 3, "feddm.least": 5, "feddm.iterations": 20,
           "feddm.server_epochs": 30, "feddm.server_batch": 64}  # fmt: skip
"""Config fields for digits. FedGEN's generator is smaller than the model, as in the paper."""
FIELDS: dict[str, dict[str, Any]] = {
    "smoke": {**_EVERY, **_DIGITS, "dense.warmup_rounds": 1, "feddm.ipc": 1, "feddm.least": 1, "feddm.iterations": 2,
              "feddm.server_epochs": 2, "client.epochs": 1, "federation.rounds": 4},
    "small": {**_EVERY, **_DIGITS, "client.epochs": 4, "federation.rounds": 20},
    "paper": _EVERY,
}  # fmt: skip
"""Config fields that each preset adds to the package's preset."""

RATES = {"smoke": ("", ""), "small": ("0.04,0.1", "0.1,0.3"), "paper": ("0.01,0.05,0.1,0.2", "")}
"""Learning rates to try, by preset: of the clients, and of FedDM's pixels.

The paper's grids are 0.01, 0.05, 0.1 for Fedssyn and 0.05, 0.1, 0.2 for FedGEN; here each method may use both grids.
"""


def fields(preset: str, dataset: str) -> Mapping[str, Any]:
    """Return the config fields (dotted names) of a preset of this table."""
    return {**presets.preset(preset, dataset), **FIELDS[preset]}
