"""``RunSpec``: an experiment as values and objects, with its data partitioned, before anything is trained."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pytorch_lightning import LightningModule

from fedcommons.config.experiment import Experiment
from fedcommons.core.algorithm import Algorithm
from fedcommons.core.local_training import LocalSGD
from fedcommons.core.worker import Worker
from fedcommons.data.clients import Clients
from fedcommons.data.examples import Dataset, Examples, without_images
from fedcommons.data.federated import ClientDatasets
from fedcommons.data.new_clients import NewClients
from fedcommons.data.partition import Partitioned
from fedcommons.errors import before_any_work, require_type, user_code_context
from fedcommons.federation.rounds import Plan
from fedcommons.flat_tensors import Flat
from fedcommons.generators.requests import GenerationRequest, GeneratorRecipe, salt_facts
from fedcommons.privacy import salts
from fedcommons.runs.early_stopping import Stop
from fedcommons.sharing.stage import Forewarning, Generating, Salted, Stage

BuildModule = Callable[..., LightningModule]
"""A function that builds the clients' module for a data set and a device; see ``worker.build_module``."""


@dataclass(frozen=True)
class Evaluation:
    """What is evaluated and measured after rounds; ``on_training``: clients are evaluated on their training examples.

    measure: name and constants of the user-defined measure; None: no such measure.
    """

    every: int = 1
    chunk: int = 1000
    of_clients: bool = False
    on_training: bool = False
    measure_every: int = 0  # 0: never
    samples: int | None = None
    smoothness: bool = False
    measure: tuple[str, Mapping[str, Any]] | None = None
    adapt_epochs: int = 1  # epochs for which a new client trains the received model


@dataclass(frozen=True)
class RunSpec:
    """All that a run does, as values and objects that ``build`` made of an experiment's fields.

    record: the experiment, for the files and trackers that describe the run; only ``tracking`` reads it.
    names: kind of component -> name of the component, for messages.
    elsewhere: builds a worker in a separate process, see ``worker.build_worker_elsewhere``.
    """

    record: Experiment
    names: Mapping[str, str]
    algorithm: Algorithm
    stage: Stage
    recipe: GeneratorRecipe | None  # None: the strategy uses no generator
    plan: Plan  # the plan of the rounds, with facts about the clients' real data
    local: LocalSGD
    module: BuildModule
    lr: float  # learning rate of local training
    elsewhere: Callable[..., Worker]
    evaluation: Evaluation
    wandb: str  # "online", "offline" or "off"
    trackers: Mapping[str, Mapping[str, Any]]  # name -> constants of each further tracker
    stop: Stop
    dataset: Dataset
    partition: Partitioned
    train: Examples  # the training examples that are partitioned, without the clients' test examples
    tests: Clients | None  # the clients' test examples; None: clients have no test examples
    noise_key: int
    is_secret: bool  # a secret salt keys the privacy noise
    delta: float
    is_audited: bool
    withholds: bool  # the audit removes near-copies before images are shared
    artifacts: Path
    storage: str | None
    storage_name: str | None
    actors: int  # processes that train clients; 0: this process
    gpus_per_actor: float | str
    transport: str
    checkpoint_every: int
    memory_bytes: float
    new_clients: NewClients | None = None  # the clients that are held out from training
    by_rule: Mapping[str, Any] = field(default_factory=dict)  # the partition's constants that a rule computed
    notes: Sequence[str] = ()  # messages to the user about data and model
    shapes: tuple[LightningModule, Flat] | None = None  # a built-in module without values (device meta), its weights

    @property
    def seed(self) -> int:
        return self.plan.seed

    @property
    def facts(self) -> Dataset:
        """Return the data set without examples: its name, shapes, types and statistics."""
        return without_images(self.dataset)

    @property
    def client_data(self) -> ClientDatasets:
        """Return the input of the sharing strategy: the clients' real data sets, and public facts about the data."""
        data, clients = self.dataset, Clients(self.train, self.partition.rows)
        return ClientDatasets(clients, data.n_classes, data.flip, self.seed, self.is_secret)

    @property
    def salts(self) -> list[str]:
        """Return two kinds of hashes: of salts for noise before round 1, and of facts that decide synthetic images."""
        client_data, stage = self.client_data, self.stage
        stage_salts = stage.salts(client_data) if client_data.is_secret and isinstance(stage, Salted) else ()
        return [*salt_facts(self.requests), *map(salts.name_of, stage_salts)]

    @property
    def notes_for_user(self) -> Sequence[str]:
        """Return the messages shown to the user before any training, including those of the sharing strategy."""
        stage = self.stage
        if not isinstance(stage, Forewarning):
            return self.notes
        with before_any_work(), user_code_context(stage, "beforehand"):
            return [*self.notes, *(require_type(str, sentence) for sentence in stage.beforehand(self.client_data))]

    @property
    def requests(self) -> Sequence[GenerationRequest]:
        """Return a generation request (generator and images) per client; empty if the strategy uses no generators."""
        stage = self.stage
        if self.recipe is None or not isinstance(stage, Generating):
            return ()
        with before_any_work(), user_code_context(stage, "requests"):
            requests = list(stage.requests(self.client_data, self.recipe))
            return [require_type(GenerationRequest, request) for request in requests]
