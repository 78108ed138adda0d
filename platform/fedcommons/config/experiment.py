"""The description of one experiment: its sections, and what of them decides its results.

It holds the constants of its chosen parts only, and so do config.yaml and hashes.
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
    """One run: data -> partition -> sharing -> federation -> measures.

    generator: None if the sharing stage needs none. constants: the algorithm's. source: kind of part to a digest of its
    code, for parts of one's own; ``weights`` to that of the file ``model.weights``. beside: fields that were given for
    parts that are not chosen, by dotted name; they are used once such a part is chosen, and are ignored when
    experiments are compared.
    """

    seed: Annotated[int, "[0, 4611686018427387904]"] = 0
    """seed of all random draws"""
    algorithm: str = "fedavg"
    """federated method"""
    target: float | str = 0.8
    """what rounds-to-target counts the rounds to: a test accuracy in (0, 1], or a metric such as "loss <= 0.3" """
    artifacts: str = "runs/artifacts"
    """folder of trained generators and synthetic images, shared between runs"""
    storage: str | None = None
    """s3://BUCKET/PREFIX or a folder that keeps runs and artifacts besides: other machines go on from there"""
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
    beside: Constants = field(default=NONE, compare=False, repr=False)

    def __post_init__(self) -> None:
        complete(self, "algorithm", self.algorithm)
        if type(self.target) in (int, float, str):  # other types are refused with all else that is wrong
            object.__setattr__(self, "target", target.plain(self.target))
        if self.source is UNSET:
            digests = {kind: digest for kind, name in self.chosen.items() if (digest := registry.source(name))}
            if self.model.weights:
                digests["weights"] = weights_file.digest(self.model.weights)
            object.__setattr__(self, "source", Constants(digests))

    @cached_property
    def chosen(self) -> Mapping[str, str]:
        """Kind of part to the name of the chosen part."""
        names = {"algorithm": self.algorithm, "data": self.data.name, "partition": self.partition.name}
        names |= {"sharing": self.sharing.setting, "schedule": self.client.lr_schedule}
        names |= {"generator": self.generator.name} if self.generator else {}
        names |= {"tracker": self.tracking.tracker} if self.tracking.tracker else {}
        names |= {"measure": self.measure.measure} if self.measure.measure else {}
        return Constants({**names, "straggler": self.straggler.rule, "model": self.model.name})

    @cached_property
    def flat(self) -> Mapping[str, Any]:
        """Dotted names to values, of the chosen parts only: ``partition.alpha``, ``fedprox.mu`` and so on."""
        values: dict[str, Any] = {}
        for field_ in fields(self):
            value = getattr(self, field_.name)
            if is_dataclass(value):
                own = {g.name: getattr(value, g.name) for g in fields(value) if g.name != "constants"}
                constants = getattr(value, "constants", {}) if "constants" in value.__dict__ else {}
                held = {f"{field_.name}.{n}": v for n, v in {**own, **constants}.items()}
                values |= {n: v for n, v in held.items() if v is not None or n not in registry.OPTIONAL}
            elif field_.name not in ("constants", "source", "beside", "generator") and (
                value is not None or field_.name not in registry.OPTIONAL
            ):
                values[field_.name] = value
        section = registry.section("algorithm", self.algorithm)
        values |= {f"{section}.{n}": v for n, v in self.constants.items()}
        return Constants(values | {f"source.{kind}": digest for kind, digest in self.source.items()})
