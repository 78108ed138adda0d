"""The strategy of another framework at the server of ``adapters.Adapted``, and the configs that it sends to clients."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from fedcommons.core.algorithm import Merged, Replies, State
from fedcommons.errors import UserError, name_of
from fedcommons.flat_tensors import Flat, flat, scalar
from fedcommons.seeding import keyed_globals
from fedcommons.testing.arrays import KEPT, METRIC, arrays_in, arrays_of, named, numbers_in, payload_of
from fedcommons.testing.comparing import raw
from fedcommons.testing.flower import aggregate, configs, parameters_for
from fedcommons.testing.kept_attributes import Leaves, attributes, changed, restore


@dataclass
class Result:
    """A client's trained parameters, number of examples and metrics, as a strategy receives them."""

    parameters: Any
    num_examples: int
    metrics: Mapping[str, Any] = field(default_factory=dict)


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
    built: Mapping[str, Leaves] = field(default_factory=dict)
    configs: Mapping[int, Mapping[str, Any]] = field(default_factory=dict)
    at: tuple[State, int] | None = None

    def start(self, model: Flat, seed: int) -> None:
        """Build the object, with the generators of torch, numpy and Python seeded by the run's seed."""
        weights = {"initial_parameters": parameters_for(self.build, arrays_of(model))} if self.takes_weights else {}
        with keyed_globals(seed, "strategy built"):
            self.strategy = self.build(**weights)
        self.built, self.at = attributes(self.strategy), None

    def configure(self, state: State, round: int) -> None:
        """Let the strategy configure a round, once; in a resumed run, rebuild the object and restore its attributes.

        Raises:
            UserError: the strategy does not choose all clients.
        """
        if self.at and self.at[0] is state and self.at[1] == round:
            return
        kept, seed = named(KEPT, state), int(scalar(state, "seed"))
        if self.strategy is None or raw(changed(self.strategy, self.built)) != raw(kept):
            self.start(flat(state, "model"), seed)
            restore(self.strategy, kept)
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

    def merge(self, state: State, replies: Replies, round: int, seed: int) -> Merged:
        """Return the state after a round, with the attributes that the strategy changed, and the strategy's numbers."""
        self.configure(state, round)
        arrays = {client: arrays_in(reply.each) for client, reply in replies.items()}
        results = {
            client: Result([*x.values()], int(replies[client].weight), numbers_in(named(METRIC, replies[client].each)))
            for client, x in arrays.items()
        }
        with keyed_globals(seed, "strategy"):
            merged, metrics = aggregate(self.strategy, round, [*next(iter(arrays.values()), {})], results)
        self.at = None
        now = {f"{KEPT}{path}": value for path, value in changed(self.strategy, self.built).items()}
        now |= {name: value for name, value in state.items() if not name.startswith(KEPT)}
        return now | (payload_of(merged, flat(state, "model")) if merged is not None else {}), numbers_in(metrics)
