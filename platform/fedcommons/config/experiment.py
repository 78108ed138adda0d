"""The configuration of one experiment: its sections, and its fields by dotted name.

An experiment, its config.yaml and its hash contain only the constants of the chosen components.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Annotated, Any

from fedcommons.config import registry, schema, target, weights_file
from fedcommons.config.schema import SECTIONS
from fedcommons.config.section import NONE, UNSET, Constants, Section, default_constants


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
    storage_name: str | None = None
    """name of this sweep or run in the storage (null: name of its folder)"""
    data: schema.Data = field(default_factory=schema.Data)
    partition: schema.Partition = field(default_factory=schema.Partition)
    sharing: schema.Sharing = field(default_factory=schema.Sharing)
    generator: schema.Generator | None = None
    model: schema.Model = field(default_factory=schema.Model)
    client: schema.Client = field(default_factory=schema.Client)
    federation: schema.Federation = field(default_factory=schema.Federation)
    communication: schema.Communication = field(default_factory=schema.Communication)
    straggler: schema.Straggler = field(default_factory=schema.Straggler)
    attack: schema.Attack = field(default_factory=schema.Attack)
    dp: schema.DP = field(default_factory=schema.DP)
    evaluate: schema.Evaluate = field(default_factory=schema.Evaluate)
    measure: schema.Measure = field(default_factory=schema.Measure)
    tracking: schema.Tracking = field(default_factory=schema.Tracking)
    constants: Constants = UNSET
    source: Constants = UNSET
    inactive: Constants = field(default=NONE, compare=False, repr=False)

    def __post_init__(self) -> None:
        if self.constants is UNSET:
            object.__setattr__(self, "constants", default_constants("algorithm", self.algorithm))
        if type(self.target) in (int, float, str):  # a wrong type is reported later, with all other errors
            object.__setattr__(self, "target", target.plain(self.target))
        if self.source is UNSET:
            names = {kind: self.chosen[kind] for kind in registry.KINDS if kind in self.chosen}
            digests = {kind: digest for kind, name in names.items() if (digest := registry.source(name))}
            if self.model.weights:
                digests["weights"] = weights_file.digest(str(self.model.weights), self.data.download)
            object.__setattr__(self, "source", Constants(digests))

    @property
    def weights(self) -> weights_file.WeightsFile | None:
        """Return the file of initial weights; None if the model's initial weights are drawn."""
        m = self.model
        renames = (m.weights_map, m.weights_strict)
        return weights_file.WeightsFile(m.weights, self.source.get("weights"), *renames) if m.weights else None

    @cached_property
    def chosen(self) -> Mapping[str, str]:
        """Return the chosen components: kind -> name. A kind without a component, such as ``tracker``, is missing."""
        names = {"algorithm": self.algorithm, "data": self.data.name, "partition": self.partition.name}
        names |= {"sharing": self.sharing.setting, "schedule": self.client.lr_schedule}
        names |= {"generator": self.generator.name} if self.generator else {}
        names |= {"tracker": registry.main_tracker(self.tracking.tracker)} if self.tracking.tracker else {}
        names |= {"measure": self.measure.measure} if self.measure.measure else {}
        return Constants({**names, "straggler": self.straggler.rule, "model": self.model.name})

    @cached_property
    def flat(self) -> Mapping[str, Any]:
        """Return dotted name -> value of all fields, with components' constants and code hashes (``source.KIND``)."""
        values: dict[str, Any] = {}
        for f in fields(self):
            value = getattr(self, f.name)
            if isinstance(value, Section):
                values |= {f"{f.name}.{n}": its for n, its in vars(value).items() if n != "constants"}
                values |= {f"{f.name}.{n}": its for n, its in value.constants.items()}
            elif f.name not in ("constants", "source", "inactive", "generator"):
                values[f.name] = value
        section = registry.section("algorithm", self.algorithm)
        values |= {f"{section}.{n}": value for n, value in self.constants.items()}
        for name in registry.OPTIONAL & {name for name, value in values.items() if value is None}:
            del values[name]
        return Constants(values | {f"source.{kind}": digest for kind, digest in self.source.items()})


def from_flat(flat: Mapping[str, Any], source: Constants, inactive: Mapping[str, Any] | None = None) -> Experiment:
    """Return the experiment with these values (dotted name -> value). source, inactive: see ``Experiment``."""
    values: dict[str, Any] = {}
    sections: dict[str, dict[str, Any]] = {}
    for name, value in flat.items():
        section, dot, leaf = name.partition(".")
        (sections.setdefault(section, {}) if dot else values)[leaf or name] = value
    for section, kind in SECTIONS.items():
        if its := sections.get(section):
            names = kind.__dataclass_fields__.keys() - {"constants"}
            constants = {name: its.pop(name) for name in list(its) if name not in names}
            values[section] = kind(**its, constants=Constants(constants))
    constants = Constants(sections.get(registry.section("algorithm", values["algorithm"])))
    return Experiment(**values, constants=constants, source=source, inactive=Constants(inactive))
