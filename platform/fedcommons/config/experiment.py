"""The configuration of one experiment: its sections, and its fields by dotted name.

An experiment, its config.yaml and its hash contain only the constants of the chosen components.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from functools import cached_property
from typing import Annotated, Any

from fedcommons.config import registry, target, weights_file
from fedcommons.config.schema import (
    DP,
    NONE,
    UNSET,
    Client,
    Constants,
    Data,
    Evaluate,
    Federation,
    Generator,
    Measure,
    Model,
    Partition,
    Sharing,
    Straggler,
    Tracking,
    complete,
)  # fmt: skip


@dataclass(frozen=True)
class Experiment:
    """The configuration of one run: data, partition, sharing strategy, federated training, measures, tracking.

    generator: section of the generator; None if the sharing strategy needs no generator. constants: the algorithm's
    constants. source: kind -> hash of the user-defined component's code; key ``weights``: hash of the file
    ``model.weights``. inactive: dotted name -> value that the user set for a component that is not chosen. The value
    applies once the component is chosen. Comparisons of experiments ignore ``inactive``.
    """

    seed: Annotated[int, "[0, 4611686018427387904]"] = 0
    """seed of all random draws, except privacy noise with dp.noise secret"""
    algorithm: str = "fedavg"
    """federated method (algorithm) that trains the server model"""
    target: float | str = 0.8
    """target of the run, whose first round is reported as rounds_to_target: a test accuracy in (0, 1], or a metric with
    a bound, such as "loss <= 0.3" """
    artifacts: str = "runs/artifacts"
    """folder in which trained generators and synthetic images are stored, so that other runs reuse them"""
    storage: str | None = None
    """remote copy of runs and artifacts, from which other machines continue: s3://BUCKET/PREFIX or a folder (null: no
    remote copy)"""
    data: Data = field(default_factory=Data)
    partition: Partition = field(default_factory=Partition)
    sharing: Sharing = field(default_factory=Sharing)
    generator: Generator | None = None
    model: Model = field(default_factory=Model)
    client: Client = field(default_factory=Client)
    federation: Federation = field(default_factory=Federation)
    straggler: Straggler = field(default_factory=Straggler)
    dp: DP = field(default_factory=DP)
    evaluate: Evaluate = field(default_factory=Evaluate)
    measure: Measure = field(default_factory=Measure)
    tracking: Tracking = field(default_factory=Tracking)
    constants: Constants = UNSET
    source: Constants = UNSET
    inactive: Constants = field(default=NONE, compare=False, repr=False)

    def __post_init__(self) -> None:
        complete(self, "algorithm")
        if type(self.target) in (int, float, str):  # a wrong type is reported later, with all other errors
            object.__setattr__(self, "target", target.plain(self.target))
        if self.source is UNSET:
            digests = {kind: digest for kind, name in self.chosen.items() if (digest := registry.source(name))}
            if self.model.weights:
                digests["weights"] = weights_file.digest(self.model.weights)
            object.__setattr__(self, "source", Constants(digests))

    @cached_property
    def chosen(self) -> Mapping[str, str]:
        """Return the chosen components: kind -> name. A kind without a component, such as ``tracker``, is missing."""
        names = {"algorithm": self.algorithm, "data": self.data.name, "partition": self.partition.name}
        names |= {"sharing": self.sharing.setting, "schedule": self.client.lr_schedule}
        names |= {"generator": self.generator.name} if self.generator else {}
        names |= {"tracker": self.tracking.tracker} if self.tracking.tracker else {}
        names |= {"measure": self.measure.measure} if self.measure.measure else {}
        return Constants({**names, "straggler": self.straggler.rule, "model": self.model.name})

    @cached_property
    def flat(self) -> Mapping[str, Any]:
        """Return dotted name -> value of all fields, with components' constants and code hashes (``source.KIND``)."""
        values: dict[str, Any] = {}
        for field_ in fields(self):
            value = getattr(self, field_.name)
            if is_dataclass(value):
                section_fields = {g.name: getattr(value, g.name) for g in fields(value) if g.name != "constants"}
                constants = getattr(value, "constants", {}) if "constants" in value.__dict__ else {}
                dotted_fields = {f"{field_.name}.{n}": v for n, v in {**section_fields, **constants}.items()}
                values |= {n: v for n, v in dotted_fields.items() if v is not None or n not in registry.OPTIONAL}
            elif field_.name not in ("constants", "source", "inactive", "generator") and (
                value is not None or field_.name not in registry.OPTIONAL
            ):
                values[field_.name] = value
        section = registry.section("algorithm", self.algorithm)
        values |= {f"{section}.{n}": v for n, v in self.constants.items()}
        return Constants(values | {f"source.{kind}": digest for kind, digest in self.source.items()})
