"""The strategy of another framework at the server of ``adapters.Adapted``, and the configs that it sends to clients."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from fedcommons.core.algorithm import Merged, Replies, State
from fedcommons.errors import UserError, name_of
from fedcommons.flat_tensors import Flat, flat, scalar
from fedcommons.seeding import keyed_globals
from fedcommons.testing.arrays import ATTRIBUTE, METRIC, arrays_in, arrays_of, named, numbers_in, payload_of
from fedcommons.testing.flower import aggregate, build_with_weights, configs
from fedcommons.testing.kept_attributes import (
    Attribute,
    attributes,
    changed,
    fingerprint,
    lost_attributes,
    restore,
    warn,
)


@dataclass
class Server:
    """A strategy's object, which lasts for a run.

    build: the class or function that builds the object. takes_weights: whether ``build`` has a parameter
    ``initial_parameters``. config: settings that clients get besides the strategy's. built: attributes of a newly
    built object. configs: client -> settings from the strategy. at: server's state and round of ``configs``.
    """

    build: Callable[..., Any]
    takes_weights: bool
    config: Mapping[str, Any]
    strategy: Any = None
    built: Mapping[str, Attribute] = field(default_factory=dict)
    configs: Mapping[int, Mapping[str, Any]] = field(default_factory=dict)
    at: tuple[State, int] | None = None

    def start(self, model: Flat, seed: int) -> None:
        """Build the object, with the generators of torch, numpy and Python seeded by the run's seed."""
        with keyed_globals(seed, "strategy built"):
            self.strategy = build_with_weights(self.build, arrays_of(model)) if self.takes_weights else self.build()
        self.built, self.at = attributes(self.strategy), None

    def configure(self, state: State, round: int) -> None:
        """Let the strategy configure a round, once; in a resumed run, rebuild the object and restore its attributes.

        Raises:
            UserError: the strategy does not choose all clients, or has attributes that cannot be restored.
        """
        if self.at and self.at[0] is state and self.at[1] == round:
            return
        stored, seed = named(ATTRIBUTE, state), int(scalar(state, "seed"))
        if self.strategy is None or fingerprint(changed(self.strategy, self.built)) != fingerprint(stored):
            if names := lost_attributes(stored):
                raise UserError(f"{self._refusal(names)}; start it again with another --out.")
            self.start(flat(state, "initial" if "initial" in state else "model"), seed)
            restore(self.strategy, stored)
        n = int(scalar(state, "n_clients")) if "n_clients" in state else 0  # runs of older versions did not store it
        with keyed_globals(seed, "configured", round):
            self.configs = configs(self.strategy, round, arrays_in(state), self.config, n) if n else {}
        self.at = (state, round)
        if len(self.configs) < n:
            raise UserError(
                f"{name_of(self.build)} chooses {len(self.configs)} of {n} clients in round {round}, and a strategy "
                "must choose all clients, because --federation.participation chooses the clients of a round; its "
                f"fraction_train or fraction_fit must be 1, and its minimum numbers of clients at most {n}."
            )

    def _refusal(self, names: str) -> str:
        what = f"attributes that changed, or cannot be compared, and that no checkpoint can store: {names}"
        return f"{name_of(self.build)} has {what}; --resume refuses such a run"

    def merge(self, state: State, replies: Replies, round: int, seed: int) -> Merged:
        """Return the state after a round, with the attributes that the strategy changed, and the strategy's numbers."""
        self.configure(state, round)
        arrays, results = {i: arrays_in(reply.each) for i, reply in replies.items()}, {}
        for i, x in arrays.items():
            n, metrics = int(replies[i].weight), numbers_in(named(METRIC, replies[i].each))
            results[i] = SimpleNamespace(parameters=[*x.values()], num_examples=n, metrics=metrics)
        with keyed_globals(seed, "strategy"):
            merged, metrics = aggregate(self.strategy, round, [*next(iter(arrays.values()), {})], results)
        self.at, attributes_now = None, changed(self.strategy, self.built)
        if names := lost_attributes(attributes_now):
            warn(self._refusal(names))
        now = {f"{ATTRIBUTE}{path}": value for path, value in attributes_now.items()}
        now |= {name: value for name, value in state.items() if not name.startswith(ATTRIBUTE)}
        return now | (payload_of(merged, flat(state, "model")) if merged is not None else {}), numbers_in(metrics)
