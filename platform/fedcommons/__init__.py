"""fedcommons: federated learning when clients' data differ and clients may put something into a commons.

``from fedcommons import ...`` gives all that experiments and parts of one's own need:

runs        Experiment, experiment, run, load, Result, sweep, load_runs, load_rounds, load_clients, means, report,
            UserError, ClientError
methods     Algorithm, ChoosesClients, Shares, Personal, TellsWork, Facts, State, Message, Reply, Replies, Common,
            Release, Work, LocalSGD, Correction, ClientData, Clients, Executor; check_algorithm, referee with Claims,
            Verdict, adapted, least_squares and audit_method test them
arithmetic  Flat, Payload, flat, flatten, scalar, add, sub, scale, zeros_like, copy, select, put, norm, sq_norm
draws       seed_for, generator, numpy_generator, set_default_generator
data        Examples, Source, Partition
sharing     Stage, Generating, TakesLong, Dealt, Contribution, Contributions, Assigned, GeneratorRecipe, Need
generators  Generator, TrainedGenerator, Receipt
late ones   Rule
watching    Tracker, Measure, RunData

These names are stable, and so are the fields of an experiment with their defaults, and the files of a run folder.
Everything else may change in any version. docs/own_parts.md, docs/notebook.ipynb and examples/ show how they are used.
"""

from logging import NullHandler, getLogger

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)  # torch alone takes seconds to import

__version__ = "0.2.0"

getLogger(__name__).addHandler(NullHandler())  # silent unless the user configures logging
