"""Check before any work that a run's method, sharing strategy, module and data fit together."""

from collections.abc import Sequence
from dataclasses import replace

import torch

from fedcommons.config import registry
from fedcommons.core.algorithm import Adapts, require_attributes
from fedcommons.core.capabilities import capabilities_of
from fedcommons.core.client_worker import trainable_parameters
from fedcommons.core.features import batch_norm_parameters, head_parameters
from fedcommons.data.examples import STANDARDISATION
from fedcommons.errors import UserError, before_any_work, user_code_context
from fedcommons.federation.new_client_evaluation import require_received_model
from fedcommons.flat_tensors import flatten
from fedcommons.generators.requests import n_seen
from fedcommons.privacy import ledger
from fedcommons.runs import check_module, pool_audit
from fedcommons.runs.checks import refuse, require_central, require_server_data, require_target
from fedcommons.runs.plans import begin
from fedcommons.runs.spec import RunSpec
from fedcommons.runs.worker import standardises
from fedcommons.runtime import memory_limit


def checked(spec: RunSpec, *, judges_delta: bool) -> RunSpec:
    """Check a run and return it with the module's facts in its plan, and with notes for the user.

    judges_delta: whether delta is checked against the clients' numbers of examples.
    """
    algorithm, dataset, loop, seen = spec.algorithm, spec.dataset, spec.local, spec.evaluation
    sizes = [len(rows) for rows in spec.partition.rows]
    require_server_data(algorithm, spec.stage, dataset.n_public)
    refuse(spec.stage, "check_data", spec.client_data)
    if spec.recipe is not None:
        refuse(spec.recipe.generator, "check_sizes", [n_seen(spec.recipe.rho, n) for n in sizes])
    if judges_delta:
        ledger.refuse_large_delta(spec.delta, sizes)
    require_target(algorithm, loop, sizes)
    if spec.is_audited:
        pool_audit.subjects(spec.client_data, spec.requests, dataset.validation)
    name = spec.names["model"]
    label = registry.component_label("model", name)
    is_user_defined = name not in registry.KINDS["model"].components or registry.is_user_defined(spec.names["data"])
    is_tried = loop.batched or loop.graphs or (loop.dp is not None and loop.dp.at_once > 1)
    # A built-in network is built on the meta device (names and shapes only), which suffices to check it.
    notes: list[str] = []
    built, device = None if is_tried else spec.shapes, "cpu" if is_user_defined or is_tried else "meta"
    module = built[0] if built else spec.module(dataset, device, notes=notes)
    if is_user_defined:
        check_module.require_hooks(algorithm, module, loop, label)
        of_clients: Sequence[int] = ()
        if seen.on_training or seen.of_clients:
            of_clients = spec.tests.sizes if spec.tests and not seen.on_training else sizes
        largest, measured = max(len(dataset.test), len(dataset.validation), *of_clients), seen.measure_every > 0
        notes += check_module.try_module(module, name, dataset, largest, seen.chunk, measured=measured)
        check_module.require_hooks(algorithm, module, loop, label)  # checked again, as a local step may assign hooks
    if is_tried:
        check_module.try_a_step(loop, name, module, dataset)
    if not built and not standardises(name, module):
        dataset = replace(dataset, computed=tuple(what for what in dataset.computed if what != STANDARDISATION))
    model = built[1] if built else flatten(trainable_parameters(module))
    memory_limit.require_model(model)
    keeps, is_kept = spec.plan.keep_buffers, capabilities_of(algorithm).keeps_batch_norm
    measured = keeps and seen.measure_every > 0 and not is_kept
    check_module.require_statistics(module, private=loop.dp is not None, measured=measured)
    require_central(spec.plan, algorithm, module, spec.delta)
    check_module.require_precision(loop.precision, module)
    require_attributes(algorithm, module)
    if dataset.n_classes is None and capabilities_of(algorithm).needs_classes:
        raise UserError(
            f"algorithm {spec.names['algorithm']} works by class, but labels of {dataset.name} are not classes."
        )
    if dataset.positions and capabilities_of(algorithm).watches_head:
        raise UserError(
            f"algorithm {spec.names['algorithm']} needs one vector of features per example, and the labels of "
            f"{dataset.name} are one class per token or pixel."
        )
    x = dataset.train.x
    if capabilities_of(algorithm).computes_inputs and not (x.is_floating_point() or x.dtype == torch.uint8):
        raise UserError(
            f"algorithm {spec.names['algorithm']} computes means or gradients of inputs, and those of {dataset.name} "
            "are tokens (whole numbers): use images or floats."
        )
    check_module.require_distillable(algorithm, module, dataset)
    # Attributes of a user-defined module may raise an error, which the context reports as an error of user code.
    with before_any_work(), user_code_context(label):
        parameters = {"head": head_parameters(module), "batch_norm": batch_norm_parameters(module)}
    facts = replace(spec.plan.facts, shape=dataset.shape, public=dataset.n_public, **parameters)
    state = begin(algorithm, model, facts, spec.seed)
    if "model" not in state:
        options = {
            "--federation.buffers keep": keeps or not is_kept,
            "--evaluate.clients true": seen.of_clients,
            "--measure.every 0": not seen.measure_every,
        }
        if lacking := [option for option, is_met in options.items() if not is_met]:
            raise UserError(
                f"algorithm {spec.names['algorithm']} has no server model, as each client has a personal model: it "
                f"needs {' and '.join(lacking)}."
            )
    if spec.new_clients:
        if isinstance(algorithm, Adapts) and seen.adapt_epochs > 1:
            name = spec.names["algorithm"]
            raise UserError(
                f"evaluate.adapt_epochs must be 0 (off) or 1 (on) with algorithm {name}, which adapts by its own rule, "
                f"got {seen.adapt_epochs}."
            )
        require_received_model(algorithm, f"algorithm {spec.names['algorithm']}", state, spec.plan)
    notes = list(spec.notes) if built else [*(dataset.origin.notes if dataset.origin else ()), *notes]
    shapes = None if is_user_defined or is_tried else (module, model)
    return replace(spec, plan=replace(spec.plan, facts=facts), dataset=dataset, notes=notes, shapes=shapes)
