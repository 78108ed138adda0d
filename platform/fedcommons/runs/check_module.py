"""Checks of a LightningModule before a run begins; some checks train or evaluate the module on a few examples."""

from collections.abc import Iterator
from contextlib import contextmanager
from inspect import signature
from math import isclose, nan
from warnings import catch_warnings

import torch
from pytorch_lightning import LightningModule
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from fedcommons.config import registry
from fedcommons.core import cuda_graphs, hooks, vmap_clients
from fedcommons.core.algorithm import Algorithm
from fedcommons.core.capabilities import capabilities_of
from fedcommons.core.client_worker import Work
from fedcommons.core.evaluation import judged
from fedcommons.core.features import seen
from fedcommons.core.functional_step import Step
from fedcommons.core.local_training import LocalSGD
from fedcommons.core.logging_shim import Logged
from fedcommons.core.module_state import gradient_hooks
from fedcommons.data.clients import ClientData
from fedcommons.data.examples import Dataset
from fedcommons.errors import UserError, before_any_work, user_code_context
from fedcommons.privacy import dp_sgd_vmap
from fedcommons.seeding import set_default_generator
from lightning_modules import Classifier

COMPILED = "it is compiled by torch.compile, which rounds differently: give the module without torch.compile"


def try_module(
    module: LightningModule, name: str, dataset: Dataset, largest: int, chunk: int, *, measured: bool
) -> list[str]:
    """Check that a module accepts the data set's examples, does not change them, and can be trained and evaluated.

    The module makes a local step on two examples. Then its initial parameters are loaded again.

    Args:
        name: the module's component name, ``model.name``.
        largest: the number of examples of the largest set on which the module is evaluated.
        chunk: the number of examples in a batch of the evaluation.
        measured: whether the estimators of convergence parameters call ``training_step``, without Lightning's hooks.

    Returns:
        A note for the user if the module logs numbers that may not be means over examples; else an empty list.

    Raises:
        UserError: the module fails a check.
    """
    # The second example has the largest label, which a model with too few outputs refuses.
    top = int(dataset.train.y.argmax()) if dataset.n_classes else 0
    rows = [*dict.fromkeys((0, top or min(1, len(dataset.train) - 1)))]
    x, y = dataset.train.x[rows], dataset.train.y[rows]
    label = registry.component_label("model", name)
    what = f"{label} on {x.dtype} examples {dataset.shape} of {dataset.name.rpartition('/')[2]}"
    with before_any_work():
        with user_code_context(label):
            _require_supported(module)
        with user_code_context(what):
            metrics = Logged(module).metrics
            others = metrics.others()
        with user_code_context(what, "", "configure_optimizers"):
            work = Work(module, torch.device("cpu"))
            require_plain(work.optimizer)
            hooks.require_called(module)  # checked again, as configure_optimizers may assign hooks
        is_hooked = bool(hooks.overridden(module, hooks.CALLED))
        with user_code_context(what, "", "training_step"), _uncompiled():
            if measured or not is_hooked:
                _require_loss(
                    module, (x, y), "set it in __init__ too, or measure.every to 0" * is_hooked, dataset.n_classes
                )
        with user_code_context(what), _uncompiled():
            work.logged.is_trial = True
            frozen = {n: p.clone() for n, p in module.named_parameters() if n not in work.named}
            work.local(work.snapshot(), ClientData(x, y), 0)
            if moved := [n for n, p in frozen.items() if not torch.equal(p, module.get_parameter(n))]:
                raise ValueError(f"training changes {moved[0]}, which has requires_grad = False and is never sent")
            work.clock.require_unset()
            work.load(work.initial)
            module.eval()
            with work.logged as logged, catch_warnings(action="ignore"):  # metrics warn of classes that the batch lacks
                numbers = judged(work, x, y, 0, dataset.n_classes or 0, what)
                if names := {"n", "round"} & {*numbers, *logged.values()}:
                    raise ValueError(f"it logs {min(names)}, a name that clients.jsonl uses: take another name")
                metrics.require_all(module, others)
            names = _no_means(work, dataset, what) if largest > chunk else []
            module.train()
            if not (torch.equal(x, dataset.train.x[rows]) and torch.equal(y, dataset.train.y[rows])):
                raise ValueError("it must not change a batch in place: write x = x - a instead of x -= a")
    if not names:
        return []
    any_name, most = names[0], f"{largest:,}"
    return [
        f"{label} logs {', '.join(names)} as numbers that are no means over examples (such as F1, AUC or a root): on "
        f"sets of up to {most} examples, the mean over chunks of {chunk:,} examples is a different number; log a "
        f"torchmetrics object (self.log('{any_name}', self.{any_name})) or set evaluate.chunk to {largest}."
    ]


def _no_means(work: Work, dataset: Dataset, what: str) -> list[str]:
    """Return the names of metrics that are not means over examples.

    For such a metric, the value on one batch of up to 64 examples differs from the mean over batches of two examples.
    what: the name of the module in error messages.
    """
    n = min(64, len(dataset.train))
    rows = torch.linspace(0, len(dataset.train) - 1, n).long()
    x, y = dataset.train.x[rows], dataset.train.y[rows]

    def sums(size: int) -> dict[str, float]:
        total = dict[str, float]()
        with work.logged, catch_warnings(action="ignore"):
            for number, (a, b) in enumerate(zip(x.split(size), y.split(size), strict=True)):
                set_default_generator(0, "no means")
                for name, value in judged(work, a, b, number, dataset.n_classes or 0, what).items():
                    total[name] = total.get(name, 0.0) + value
        return total

    whole, parts = sums(n), sums(2)
    same = {name for name in whole if isclose(whole[name], parts.get(name, nan), rel_tol=1e-5, abs_tol=1e-7)}
    return sorted({*whole, *parts} - same)


def _require_loss(module: LightningModule, batch: tuple[Tensor, Tensor], advice: str, n_classes: int | None) -> None:
    """Check that ``training_step`` returns a loss outside of local training, where no Lightning hook is called.

    advice: the end of the error message if an attribute is missing that a hook would set; empty if there is no hook.

    Raises:
        ValueError: ``training_step`` returns no loss.
    """
    try:
        loss = module.training_step(batch, 0)
    except AttributeError as error:
        if not (advice and error.obj is module):
            raise
        raise ValueError(f"it reads self.{error.name}, which is not set in measurements: {advice}") from error
    except (IndexError, RuntimeError) as error:
        y = batch[1]
        is_ours = getattr(type(module), "training_step", None) is Classifier.training_step
        is_by_position = is_ours and y.dim() > 1 and not y.is_floating_point()
        if not (is_by_position or isinstance(error, IndexError)):
            raise
        shape = tuple(getattr(module(batch[0]), "shape", ()))
        if is_by_position and shape[2:] != y.shape[1:]:
            raise ValueError(
                f"forward returns {shape}, and labels are whole numbers {tuple(y.shape)}, a class per position, which "
                "needs logits (n, classes, ...); for several tasks per example, convert the labels to floats"
            ) from error
        if not (n_classes and len(shape) == 2 and shape[1] < n_classes):
            raise
        raise ValueError(f"forward returns {shape[1]} outputs, and the data have {n_classes} classes") from error
    if not (isinstance(loss, Tensor) and loss.numel() == 1 and loss.requires_grad):
        raise ValueError("training_step must return the loss, one number with a gradient")


def _require_supported(module: LightningModule) -> None:
    """Refuse a module with a feature that local training does not support.

    Raises:
        ValueError: the module has such a feature.
    """
    tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    for name, tensor in tensors.items():
        if is_lazy(tensor):
            raise ValueError(f"{name} has no shape before the first batch: give lazy layers their sizes")
        if tensor.is_meta:
            raise ValueError(f"{name} is on the meta device, without values")
    parameters = dict(module.named_parameters())
    kinds = {parameter.dtype for parameter in parameters.values() if parameter.requires_grad}
    if len(kinds) > 1 or not kinds <= {torch.float32, torch.float64}:
        worst = next(iter(kinds - {torch.float32, torch.float64}), torch.float64)
        raise ValueError(f"its trained parameters must all be float32, or all float64, and some are {worst}")
    at: dict[int, str] = {}
    for name, parameter in parameters.items():
        if parameter.numel() and (other := at.setdefault(parameter.data_ptr(), name)) != name:
            raise ValueError(
                f"{other} and {name} share their memory: tie them by using one nn.Parameter in both places"
            )
    if any(hasattr(layer, "_orig_mod") or getattr(layer, "_compiled_call_impl", None) for layer in module.modules()):
        raise ValueError(COMPILED)
    hooks.require_called(module)
    if not module.automatic_optimization:
        raise ValueError("automatic_optimization = False is not supported: the platform takes the optimizer's steps")


@contextmanager
def _uncompiled() -> Iterator[None]:
    """Refuse calls of code that torch.compile compiled, such as a method or a function of the user's file.

    Raises:
        ValueError: compiled code was called.
    """
    try:
        with torch.compiler.set_stance("fail_on_recompile"):
            yield
    except RuntimeError as error:  # only torch's errors, as str() of a user's error may fail
        if type(error).__module__.startswith(("builtins", "torch")) and "fail_on_recompile" in str(error):
            raise ValueError(COMPILED) from error
        raise


def require_plain(optimizer: torch.optim.Optimizer) -> None:
    """Refuse an optimizer whose ``step`` needs a closure, such as LBFGS.

    Raises:
        ValueError: the optimizer needs a closure.
    """
    closure = signature(type(optimizer).step).parameters.get("closure")
    if closure is not None and closure.default is closure.empty:
        raise ValueError(f"{type(optimizer).__name__} needs a closure, and a local step computes one gradient only")


def require_hooks(algorithm: Algorithm, module: LightningModule, loop: LocalSGD, model: str) -> None:
    """Refuse a module with a hook that local training does not call, or calls for some of the batches only.

    model: the label of the module in the error message.

    Raises:
        UserError: the module has a hook that is not called for every batch.
    """
    called = hooks.overridden(module, hooks.CALLED)
    called += [f"on the gradient of {name}" for name in gradient_hooks(module)]
    if not called:
        return
    name, has = type(algorithm).__name__, f"{model} has the hook {called[0]}"
    for field, value, is_set in (
        ("dp.local", "false", loop.dp is not None),
        ("client.batched", "false", loop.batched),
        ("client.graphs", "false", loop.graphs),
        ("client.precision", "fp32, tf32 or bf16", loop.precision == "fp16-mixed"),
    ):
        if is_set:
            raise UserError(f"{field} must be {value}: {has}, and hooks are called between plain steps only.")
    capabilities = capabilities_of(algorithm)
    if not (capabilities.trains_locally or capabilities.needs_pool):
        raise UserError(f"{has}, and {name} never calls it, as its clients make no local steps.")
    transfer = hooks.overridden(module, hooks.TRANSFER)
    if transfer and (capabilities.needs or capabilities.distils or capabilities.watches_head):
        raise UserError(
            f"{model} changes batches in its hook {transfer[0]}, and {name} also gives the model examples that no "
            "hook has seen: change them in training_step, validation_step and forward."
        )


def require_distillable(algorithm: Algorithm, module: nn.Module, dataset: Dataset) -> None:
    """If the algorithm distils, refuse a model whose forward returns no logits, and data that the server cannot create.

    An algorithm distils if its server trains the model to match logits, on images that it creates, on the pool or on
    public examples. module: on any device, also meta.

    Raises:
        UserError: labels are not classes, the server would create examples that are no images, the model returns no
            logits, or ``_require_pixels`` refuses the model.
    """
    capabilities = capabilities_of(algorithm)
    if not capabilities.distils:
        return
    name, x = type(algorithm).__name__, dataset.train.x
    if dataset.n_classes is None:
        raise UserError(f"{name} distils logits of classes, and labels of {dataset.name} are not classes.")
    if (x.dtype != torch.uint8 or x.dim() != 4) and not (capabilities.needs_pool or capabilities.needs_public):
        kind = f"{x.dtype} of shape {dataset.shape}"
        raise UserError(
            f"{name} makes images (C, H, W) with pixels in 0..255, and examples of {dataset.name} are {kind}."
        )
    with before_any_work(), user_code_context(module, "", "forward"), torch.no_grad():
        first = next(module.parameters(), None)
        logits = module.eval()(x[:2] if first is None else x[:2].to(first.device))
        module.train()
    shape = tuple(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
    if shape != (2, dataset.n_classes):
        raise UserError(
            f"{name} distils logits, and for two examples the model's forward returns {shape} instead of "
            f"{(2, dataset.n_classes)}."
        )
    if capabilities.trains_images and not logits.is_meta:
        _require_pixels(name, module, x[:2], first)


def _require_pixels(name: str, module: nn.Module, x: Tensor, like: Tensor | None) -> None:
    """Refuse a model that returns different logits for uint8 pixels and for the same pixels as floats.

    name: the algorithm's name. x: images, of which only the shape is used. like: a parameter of the model, whose device
    and type the pixels get; None: CPU, float32.

    Raises:
        UserError: the logits differ. The model scales only uint8 images, and has no method ``normalise`` for floats.
    """
    device, kind = (torch.device("cpu"), torch.float32) if like is None else (like.device, like.dtype)
    images = torch.arange(x.numel(), device=device).remainder(256).to(torch.uint8).view(x.shape)
    with before_any_work(), user_code_context(module, "", "forward"), torch.no_grad():
        module.eval()
        expected, logits = module(images), module(seen(module, images.to(kind) / 255))
        module.train()
    if not torch.allclose(logits, expected, rtol=0, atol=0.01 * float(expected.abs().max())):
        raise UserError(
            f"{name} trains images through the model, whose logits differ between floating pixels in 0..255 and equal "
            "uint8 pixels: give the module normalise(x), which maps floating pixels to its network's input."
        )


def require_precision(precision: str, module: nn.Module) -> None:
    """Refuse a value of ``client.precision`` that has no effect on the model.

    Raises:
        UserError: the model is in float64, and the precision is not fp32.
    """
    if precision != "fp32" and any(p.dtype == torch.float64 for p in module.parameters()):
        raise UserError(f"client.precision must be fp32 for a float64 model, on which {precision} has no effect.")


def require_statistics(module: nn.Module, *, private: bool, measured: bool) -> None:
    """Refuse a module with BatchNorm layers where BatchNorm cannot be used.

    private: local training uses DP-SGD, which needs separate gradients of the examples. measured: convergence
    parameters are measured at a server model that has no BatchNorm statistics.

    Raises:
        UserError: the module has BatchNorm, and ``private`` or ``measured`` is True.
    """
    if not any(isinstance(layer, nn.modules.batchnorm._BatchNorm) for layer in module.modules()):
        return
    if private:
        raise UserError("dp.local is not for a model with BatchNorm: its statistics mix the examples of a batch.")
    if measured:
        raise UserError("measure.every must be 0 with federation.buffers keep: the server model has no statistics.")


def try_a_step(loop: LocalSGD, model: str, module: LightningModule, dataset: Dataset) -> None:
    """Check on a batch of two examples that the module works with the faster training loops that are requested.

    The faster loops are ``client.batched``, ``client.graphs`` and ``dp.at_once`` above 1. model: the component's name.

    Raises:
        UserError: the module does not work with a requested option.
    """
    some, work = dataset.train[slice(0, 2)], Work(module, torch.device("cpu"))
    batch = some.x.clone(), some.y.clone()
    if loop.batched and (reason := vmap_clients.flaw(work, batch)):
        raise UserError(f"client.batched must be false for model {model}: {reason.rstrip('.')}.")
    if loop.graphs and (reason := cuda_graphs.flaw(work, batch)):
        raise UserError(f"client.graphs must be false for model {model}: {reason.rstrip('.')}.")
    if loop.dp and loop.dp.at_once > 1 and (reason := dp_sgd_vmap.flaw(Step(work.module), work.named, batch)):
        raise UserError(f"dp.at_once must be 1 for model {model}: {reason.rstrip('.')}.")
