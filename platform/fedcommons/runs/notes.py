"""What a run tells the user before round 1: leaks, the audit's result, and options that change nothing."""

from collections.abc import Callable
from pathlib import Path

import torch

from fedcommons.core.algorithm import Algorithm, State
from fedcommons.core.client_worker import Work
from fedcommons.core.vmap_clients import request_training
from fedcommons.core.worker import default_device
from fedcommons.data.clients import ClientData
from fedcommons.errors import Warned
from fedcommons.federation.client_memory import ClientMemory
from fedcommons.federation.rounds import Plan
from fedcommons.runs.assemble import Assembled
from fedcommons.runs.plans import joining_of


def say_before_rounds(ready: Assembled, folder: Path, say: Callable[[str], None]) -> None:
    """Report what the user must know of the shared data and the options, and write ``audit.json`` to ``folder``."""
    spec = ready.spec
    for note in ready.shared.notes:
        say(note)
    if spec.local.dp or spec.plan.central or any(event.covered for event in ready.shared.releases):
        for what, reason in ready.plan.leaks.items():
            say(Warned(f"no epsilon covers this run: {what}: {reason}"))
    if attack := ready.plan.attack:
        rows = "; convergence measures and shared data contain their false examples" * attack.is_on_data
        say(f"{len(attack.clients)} of {ready.plan.facts.n_clients} clients are Byzantine (see partition.json){rows}.")
    if ready.audited:
        ready.audited.write(folder)
        say(ready.audited.text)
    elif spec.is_audited:
        say(f"no audit: with sharing.setting {spec.names['sharing']} no generator makes images.")
    if spec.local.batched:
        work = Work(ready.module(), torch.device("cpu"), spec.local)
        state, rows = ready.start(ClientMemory()).state, ready.data.clients[0]
        if reason := _trains_alone(ready.plan, ready.algorithm, work, state, rows, spec.seed):
            say(f"client.batched changes nothing: {reason}.")
    if spec.local.graphs and not spec.actors and default_device().type == "cpu":
        say("client.graphs changes nothing: this process sees no GPU.")


def _trains_alone(plan: Plan, algorithm: Algorithm, work: Work, state: State, rows: ClientData, seed: int) -> str:
    """Return why ``client.batched`` has no effect; "" if it has one. Only the first client's training is checked.

    Args:
        work: the module, device and local training of a worker process.
        state: the server's state before round 1.
        rows: the examples of the first client.
    """
    joined = joining_of(algorithm, plan.facts.n_clients, plan.participation)
    if joined is not None and joined <= plan.blocks:
        fewer = f"{joined} clients of a round are in a block each; lower federation.blocks below {joined}"
        return fewer if joined > 1 else "a round has one client"
    work.begin(1, rows)
    job = request_training(work, lambda: algorithm.client(work, algorithm.down(state, 1, 0), {}, rows, 1, seed))
    return "the method changes the loss, learning rate or gradient" if job is None else ""
