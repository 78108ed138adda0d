"""What attacks the generators of a pool: by membership, by canaries, and the classifier in whose features it looks."""

from collections.abc import Callable
from dataclasses import replace

import torch
from pytorch_lightning import LightningModule

from fedcommons.audits import membership, one_run
from fedcommons.audits.closeness import Subject
from fedcommons.audits.membership import Attack, Losing
from fedcommons.audits.one_run import LOOKS, Bounded
from fedcommons.core.local import LocalSGD, Work
from fedcommons.data.clients import ClientData
from fedcommons.data.examples import Examples
from fedcommons.runs.build import Prepared, build_module, recipe
from fedcommons.seeds import numpy_generator, seed_for
from fedcommons.sharing.needs import Need
from fedcommons.sharing.synthetic_pool import Job


def classifier(prepared: Prepared) -> LightningModule:
    """The run's model, trained on the validation set, so on nothing that is compared in its feature space."""
    of, seed = prepared.dataset.validation, prepared.config.seed
    work = Work(build_module(prepared.config, prepared.dataset), torch.device("cpu"), LocalSGD(20, 10))
    if len(of):
        work.local(work.initial, ClientData(of.x, of.y), seed_for(seed, "classifier of an audit"))
    return work.module


def attacked(prepared: Prepared, one: Subject, shadows: int, say: Callable[[str], None]) -> dict[str, Attack]:
    """The membership attacks on generators like this client's."""
    generator, data, seed = recipe(prepared.config).generator, prepared.dataset, prepared.config.seed
    seen = one.seen[one.matched]
    images = Examples(torch.cat([seen.x, one.held_out.x]), torch.cat([seen.y, one.held_out.y]))
    inside = membership.halves(images.y.numpy(), shadows, seed)
    kinds = {"pool": membership.by_pool, **({"loss": membership.by_loss} if isinstance(generator, Losing) else {})}
    found = membership.scores(generator, images, inside, data.n_classes, seed, [*kinds.values()], data.flip, say)
    ratios = (membership.likelihood_ratios(each, inside) for each in found)
    return {name: membership.attack(each, inside, seed) for name, each in zip(kinds, ratios, strict=True)}


def bounded(prepared: Prepared, one: Subject, canaries: int) -> Bounded:
    """The lower bound on the epsilon of a generator like this client's."""
    generator, n_classes, seed = recipe(prepared.config).generator, prepared.dataset.n_classes, prepared.config.seed
    by = membership.by_loss if isinstance(generator, Losing) else membership.by_pool
    test, delta = prepared.dataset.test, prepared.config.dp.delta
    some = test[numpy_generator(seed, "canaries").permutation(len(test))[:canaries]]
    return one_run.bound(generator, one.seen, some, n_classes, seed, by, delta=delta)


def generators(of: Need, test: Examples, shadows: int, canaries: int) -> list[Job]:
    """What the attacks train and draw, for its price: shadows, and two with and without canaries."""
    own, some = of.examples, test[: min(canaries, len(test))]
    inside = Examples(torch.cat([own.x, some.x[::2]]), torch.cat([own.y, some.y[::2]]))
    drawn = some.y[:1] if isinstance(of.recipe.generator, Losing) else some.y.repeat(LOOKS)
    shadow = Job([replace(of, labels=own.y.repeat(2))], {})
    with_and_without = [Job([replace(of, examples=seen, labels=drawn)], {}) for seen in (inside, own)]
    return [*[shadow] * shadows, *with_and_without]
