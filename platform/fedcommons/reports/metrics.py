"""Metrics that compare runs (number columns of ``load_runs``): axis labels, better direction, and required fields."""

from collections.abc import Sequence
from typing import Any

from fedcommons.config import target
from fedcommons.config.dotted import SHORT_NAMES, values_of
from fedcommons.config.experiment import Experiment
from fedcommons.errors import UserError, unknown
from fedcommons.privacy.salts import IF_SECRET
from fedcommons.tracking.metric_names import NAMES

OF_TEST_DATA = ("rounds_to_target", "best_accuracy", "last_accuracy")
EPSILONS = ("epsilon", "epsilon_local_training", "pool_epsilon")
METRICS = (
    "validation_accuracy", *OF_TEST_DATA, "MB", "bytes_down", "bytes_up", "bytes_once", "disclosed",
    *EPSILONS, *(f"{name}{IF_SECRET}" for name in EPSILONS), *NAMES, *(f"{name}_mean" for name in NAMES),
)  # fmt: skip
"""Names of metrics that are known before a run. Other metrics have a slash in their name, such as train/loss."""

WORDS = {
    "validation_accuracy": "validation accuracy", "validation/accuracy": "validation accuracy",
    "rounds_to_target": "rounds to the target", "best_accuracy": "best test accuracy",
    "last_accuracy": "test accuracy of the last round", "test/accuracy": "test accuracy of the last round",
    "train/loss": "training loss", "test/loss": "test loss", "validation/loss": "validation loss",
    "clients/accuracy_mean": "accuracy on clients' own test data, mean",
    "clients/accuracy_worst_decile": "accuracy on own test data, worst tenth of clients",
    "personal/accuracy_mean": "accuracy of personal models, mean over clients",
    "personal/accuracy_worst_decile": "accuracy of personal models, worst tenth of clients",
    "new/accuracy_mean": "accuracy of the model that new clients receive, mean",
    "new/adapted_accuracy_mean": "accuracy of new clients' adapted models, mean",
    "attack/success": "share of the test images with the backdoor's square that get the class attack.target",
    "MB": "MB exchanged by all clients", "bytes_down": "bytes to the clients", "bytes_up": "bytes from the clients",
    "comm/total_bytes": "bytes up to this round, shared data included",
    "comm/once_bytes": "bytes of shared data before round 1, in round 0 only",
    "bytes_once": "bytes of shared data", "epsilon": r"$\varepsilon$ of all messages",
    "epsilon_local_training": r"$\varepsilon$ of local training",
    "pool_epsilon": r"$\varepsilon$ of shared data, maximum over clients",
    "epsilon_if_secret": r"$\varepsilon$ of all messages, if the noise were secret",
    "epsilon_local_training_if_secret": r"$\varepsilon$ of local training, if the noise were secret",
    "pool_epsilon_if_secret": r"$\varepsilon$ of shared data, if the noise were secret",
    "gradient_sq": r"$\|\nabla f\|^2$", "zeta_sq": r"client dissimilarity $\zeta^2$, own data",
    "zeta_hat_sq": r"client dissimilarity $\hat\zeta^2$, training data",
    "zeta_lemma1_sq": r"client dissimilarity $\zeta^2$ by Lemma 1", "sigma_sq": r"gradient noise $\sigma^2$, own data",
    "sigma_hat_sq": r"gradient noise $\hat\sigma^2$, training data",
    "sigma_lemma1_sq": r"gradient noise $\sigma^2$ by Lemma 1", "delta_sq": r"shift of the pool $\delta^2$",
    "L_max": r"smoothness $L_{max}$, own data", "L_p": "smoothness $L_p$, training data",
    "data.name": "data set", "dataset": "data set", "algorithm": "algorithm", "sharing.setting": "sharing strategy",
    "setting": "sharing strategy", "partition.alpha": r"Dirichlet concentration $\alpha$",
    "partition.n_clients": "clients N", "federation.participation": "share C of clients in a round",
    "federation.rounds": "rounds R", "disclosed": "share of the clients' examples disclosed",
    "sharing.p": "share p of shared data", "generator.rho": r"share $\rho$ of images that generators see",
    "dp.noise_multiplier": r"noise multiplier $\sigma$", "client.lr": "learning rate",
    "client.epochs": "local epochs E", "client.batch_size": "batch size B", "target": "target", "seed": "seed",
}  # fmt: skip
"""Axis labels of the usual metrics and config fields."""


def words(name: str) -> str:
    """Return the axis label of a metric or config field, or its name if ``WORDS`` has no label."""
    if name.endswith("_mean") and name not in WORDS:
        return f"{words(name.removesuffix('_mean'))}, mean over rounds"
    return WORDS.get(name, WORDS.get(SHORT_NAMES.get(name, ""), name))


def is_accuracy(metric: str) -> bool:
    """Return whether the metric is an accuracy, with values in [0, 1]."""
    return "accuracy" in metric


def mode(metric: str, goal: float | str = 1.0) -> str:
    """Return the better direction of a metric, ``max`` or ``min``; a UserError is raised if it is unknown.

    goal: the target of the runs, which determines the direction if it is a bound on ``metric``.
    """
    if metric not in METRICS and "/" not in metric:
        raise unknown("metric", metric, METRICS)
    if (aim := target.read(goal)).metric == metric:
        return aim.way
    if metric.endswith("_std"):  # for a standard deviation over clients, smaller is better
        return "min"
    if is_accuracy(metric):
        return "max"
    if metric in METRICS or metric.split("/")[0] in ("comm", "privacy", "convergence", "attack") or "loss" in metric:
        return "min"
    raise UserError(f"--metric {metric} needs --mode max or --mode min, because the better direction is unknown.")


def sees_test_data(metric: str) -> bool:
    """Return whether the metric is computed from test data, so that a choice by this metric uses test data."""
    prefixes = ("clients/", "personal/", "new/")
    of_clients = metric.startswith(prefixes) and "/train_" not in metric and "/worst" not in metric
    return metric.removesuffix("_mean") in OF_TEST_DATA or "test/" in metric or "attack/" in metric or of_clients


def require(metric: str, configs: Sequence[Experiment]) -> None:
    """Raise a UserError if there is no such metric, or if one of these experiments does not measure it."""
    if metric not in METRICS and "/" not in metric:
        raise unknown("metric", metric, METRICS)
    for field, least, needed in _needs(metric.removesuffix("_mean")):
        if any(dict(values_of(config))[field] <= least for config in configs):
            raise UserError(f"--metric {metric} needs --{field} {needed}.")


def _needs(metric: str) -> list[tuple[str, Any, str]]:
    """Return (config field, value, allowed values as text): runs log the metric if each field exceeds its value."""
    if metric.startswith("validation"):
        return [("data.validation", 0, "above 0")]
    if metric.startswith(("clients/", "personal/")):
        field = "measure.clients" if metric.startswith("clients/worst") else "evaluate.clients"
        return [(field, False, "true")]
    if metric.startswith("new/"):
        return [("evaluate.new_clients", 0, "above 0")]
    if metric.startswith("epsilon"):
        return [("dp.local", False, "true")]
    measured = [("measure.every", 0, "above 0")] if metric in NAMES else []
    return [*measured, ("measure.smoothness", False, "true")] if metric in NAMES and metric[0] == "L" else measured
