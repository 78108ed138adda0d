"""Option names of other programs and papers, and for each name this platform's field or a hint for the user."""

import re
from collections.abc import Collection

from fedcommons.config import torchvision_names
from fedcommons.errors import UserError, quote, unknown

FIELDS = {
    "partition.n_clients": "N K num-clients n-clients total-clients client-num-in-total num-supernodes",
    "federation.participation": "C fraction client-fraction frac fraction-fit fraction-train participation-rate "
    "join-ratio",
    "federation.rounds": "T R num-rounds num-server-rounds global-rounds comm-round communication-rounds",
    "client.epochs": "E local-epochs num-epochs local-ep",
    "client.batch_size": "B bs local-batch-size local-bs",
    "client.lr": "learning-rate eta local-lr local-learning-rate",
    "client.weight_decay": "wd",
    "partition.alpha": "dirichlet dirichlet-alpha concentration",
    "algorithm": "method strategy algo",
    "federation.aggregation": "aggregator aggregation aggregation-rule defense defence",
    "model.name": "arch network net backbone",
    "data.dir": "root data-root data-path dataset-dir",
    "straggler.q": "stragglers straggler-rate dropout drop-rate",
    "out": "output output-dir out-dir save-dir results-dir logdir log-dir",
    "dp.target_epsilon": "epsilon target-epsilon",
    "client.clip_norm": "clip-norm gradient-clip-val",
    "dp.clip": "max-grad-norm",
}
"""Field or option -> its names in other programs and papers, separated by spaces. Single letters are case-sensitive."""

SENTENCES = {
    "gpu gpus num-gpus device cuda accelerator": "a GPU is used if torch finds one, and CUDA_VISIBLE_DEVICES selects "
    "it; --federation.gpus_per_actor shares a GPU among --federation.actors",
    "worker workers num-workers cpus num-cpus threads jobs n-jobs": "one process trains the clients, or several with "
    "--federation.executor ray_actors --federation.actors N",
    "epsilon target-epsilon": "the epsilon of clients' training follows from --dp.local true --dp.noise_multiplier; a "
    "generator's epsilon is set by --generator private_ddpm --generator.target_epsilon",
    "clip-norm gradient-clip-val": "--dp.clip is the clipping norm of --dp.local true",
    "beta": "the concentration of a Dirichlet partition is --alpha, and a method's constant is written after the "
    "method's name, as in --fedprox.mu",
    "proximal-mu": "the constant is --fedprox.mu of --algorithm fedprox",
    "server-learning-rate": "the server's learning rate is a constant of a method, as in --fedadam.server_lr",
    "fraction-evaluate evaluate-fn": "the server model is evaluated every --evaluate.every rounds, and with "
    "--evaluate.clients true the clients' models, too",
    "verbose debug": "--log-file FILE --log-level debug keeps every metric",
    "iid non-iid": "--partition iid assigns examples to clients at random, and --partition dirichlet_classes "
    "--alpha 0.1 unequally by class",
    "seeds": "a run has one --seed, and the other commands take --seeds",
}
"""Option names without an equivalent field -> the hint that the error message shows for such a name."""

ELSEWHERE = {
    "algorithm": "fedadam fedyogi fedadagrad fedavgm fedopt ditto fedbn fedper fedgen feddf fedsgd fedproto mime fedma "
    "qfedavg qffl fedrod fedala fedcm feddc fedntd fedlc fedrs fedasync fedbuff bulyan ifca local",
    "data": "femnist shakespeare celeba sent140 tinyimagenet imagenet stackoverflow reddit cinic10 adult agnews "
    "20newsgroups medmnist pathmnist",
    "model": "mlp lenet lenet5 resnet20 resnet34 resnet50 vgg16 vit lstm bert mobilenet densenet",
    "partition": "pathological",
}
"""Kind of component -> names of components from the literature that the package may lack.

If the package lacks such a name, the error message suggests no similar name. Names in the package may be listed too."""

ROBUST = "krum multikrum fedmedian median fedtrimmedavg trimmedmean rfa geometricmedian"
"""Names of methods that are FedAvg with a robust aggregation, which is an option of every averaging method here."""


def _plain(word: str) -> str:
    return word if len(word) == 1 else re.sub(r"[-_.]", "", word).lower()


_FIELDS = {_plain(word): field for field, words in FIELDS.items() for word in words.split()}
_SENTENCES = {_plain(word): sentence for words, sentence in SENTENCES.items() for word in words.split()}


def field_for(word: str, names: Collection[str]) -> str | None:
    """Return the field or option in ``names`` that other programs call ``word``; None if ``names`` lacks the field."""
    field = _FIELDS.get(_plain(word))
    return field if field in names else None


def sentence_for(word: str) -> str | None:
    """Return the hint of ``SENTENCES`` for an option name without an equivalent field; None if there is no hint."""
    return _SENTENCES.get(_plain(word))


def unknown_key(name: str, names: Collection[str]) -> UserError:
    """Return the error for an unknown field, with a hint if other programs use this name; ``names``: all fields."""
    field = field_for(name, names)
    if hint := f"use {field}" if field else sentence_for(name):
        return UserError(f"unknown config key {quote(name)}: {hint}.")
    return unknown("config key", name, names)


def unknown_component(kind: str, field: str, name: str, components: Collection[str]) -> UserError:
    """Return the error for a component that the package lacks; ``components``: the names that the package has."""
    hint = f"an import path of your code, such as my_{kind}.py:Name"
    if kind == "algorithm" and _plain(name) in ROBUST.split():
        return UserError(f"{field} {quote(name)} is an aggregation rule: try --federation.aggregation median.")
    if kind == "data" and name.endswith((".npz", ".npy", ".csv", ".pt", ".parquet")):
        return UserError(f"{field} {quote(name)} is a file: name a function that reads it and returns (x, y): {hint}.")
    if same := torchvision_names.same(kind, name):
        return UserError(f"unknown {field} {quote(name)}; did you mean {same[0]!r}?")
    if _plain(name) in ELSEWHERE.get(kind, "").split():
        names = ", ".join(sorted(components))
        return UserError(f"{field} {quote(name)} is not in the package: use one of {names}, or {hint}.")
    return unknown(field, name, components, f"or {hint}" if components else hint)
