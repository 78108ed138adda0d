"""The public names and their modules; `__init__.py` imports a module when one of its names is used."""

from .audits.canaries import audit_method as audit_method
from .config.experiment import Experiment as Experiment
from .core.algorithm import (
    Adapts as Adapts,
)
from .core.algorithm import (
    Algorithm as Algorithm,
)
from .core.algorithm import (
    ChoosesClients as ChoosesClients,
)
from .core.algorithm import (
    Common as Common,
)
from .core.algorithm import (
    Facts as Facts,
)
from .core.algorithm import (
    Message as Message,
)
from .core.algorithm import (
    Personal as Personal,
)
from .core.algorithm import (
    Replies as Replies,
)
from .core.algorithm import (
    Reply as Reply,
)
from .core.algorithm import (
    Shares as Shares,
)
from .core.algorithm import (
    State as State,
)
from .core.capabilities import Capabilities as Capabilities
from .core.client_worker import Work as Work
from .core.executor import Executor as Executor
from .core.local_training import Correction as Correction
from .core.local_training import LocalSGD as LocalSGD
from .core.worker import RunData as RunData
from .data.clients import ClientData as ClientData
from .data.clients import Clients as Clients
from .data.examples import Examples as Examples
from .data.examples import Source as Source
from .data.federated import ClientDatasets as ClientDatasets
from .data.partition import Partition as Partition
from .errors import ClientError as ClientError
from .errors import UserError as UserError
from .federation.stragglers import Rule as Rule
from .flat_tensors import (
    Flat as Flat,
)
from .flat_tensors import (
    Payload as Payload,
)
from .flat_tensors import (
    add as add,
)
from .flat_tensors import (
    copy as copy,
)
from .flat_tensors import (
    flat as flat,
)
from .flat_tensors import (
    flatten as flatten,
)
from .flat_tensors import (
    norm as norm,
)
from .flat_tensors import (
    put as put,
)
from .flat_tensors import (
    scalar as scalar,
)
from .flat_tensors import (
    scale as scale,
)
from .flat_tensors import (
    select as select,
)
from .flat_tensors import (
    sq_norm as sq_norm,
)
from .flat_tensors import (
    sub as sub,
)
from .flat_tensors import (
    zeros_like as zeros_like,
)
from .generators.generator import Generator as Generator
from .generators.generator import Receipt as Receipt
from .generators.generator import TrainedGenerator as TrainedGenerator
from .generators.requests import Contribution as Contribution
from .generators.requests import GenerationRequest as GenerationRequest
from .generators.requests import GeneratorRecipe as GeneratorRecipe
from .privacy.release import Release as Release
from .reports.cells import means as means
from .reports.frames import load_clients as load_clients
from .reports.frames import load_rounds as load_rounds
from .reports.frames import load_runs as load_runs
from .reports.page import report as report
from .runs.callbacks import Measure as Measure
from .seeding import (
    generator as generator,
)
from .seeding import (
    numpy_generator as numpy_generator,
)
from .seeding import (
    seed_for as seed_for,
)
from .seeding import (
    set_default_generator as set_default_generator,
)
from .sharing.stage import (
    Assigned as Assigned,
)
from .sharing.stage import (
    Contributions as Contributions,
)
from .sharing.stage import (
    Generating as Generating,
)
from .sharing.stage import (
    Stage as Stage,
)
from .sharing.stage import (
    TakesLong as TakesLong,
)
from .testing.adapters import adapted as adapted
from .testing.contract import check_algorithm as check_algorithm
from .testing.federations import least_squares as least_squares
from .testing.referee import Claims as Claims
from .testing.referee import Verdict as Verdict
from .testing.referee import referee as referee
from .tracking.tracker import Tracker as Tracker
from .tune.api import Result as Result
from .tune.api import load as load
from .tune.api import run as run
from .tune.api import sweep as sweep
from .tune.objects import experiment as experiment

__all__: list[str]
__version__: str
