"""What attacks the generators of a pool: by membership, by canaries, and the classifier in whose features it looks."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from pytorch_lightning import LightningModule

from fedcommons.artifacts import Store
from fedcommons.audits import membership, one_run, pool
from fedcommons.audits.closeness import Subject
from fedcommons.audits.copies import audit
from fedcommons.audits.membership import Attack, Losing
from fedcommons.audits.one_run import FEWEST, LOOKS, Bounded
from fedcommons.config import cli, presets
from fedcommons.core.local import LocalSGD
from fedcommons.core.work import Work
from fedcommons.core.worker import fresh_torch, set_up_process
from fedcommons.data.clients import ClientData
from fedcommons.data.examples import Examples
from fedcommons.errors import UserError
from fedcommons.files import write_json, write_text
from fedcommons.runs.build import OnStep, Prepared, prepare, recipe, synthetic_images
from fedcommons.runs.worker import build_module
from fedcommons.seeds import numpy_generator, seed_for
from fedcommons.sharing import synthetic_pool
from fedcommons.sharing.needs import Need
from fedcommons.sharing.synthetic_pool import Job
from fedcommons.sweeping import planned
from papers.fedssyn import audits as pictures


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
    found = membership.scores(generator, images, inside, data.classes, seed, [*kinds.values()], data.flip, say)
    ratios = (membership.likelihood_ratios(each, inside) for each in found)
    return {name: membership.attack(each, inside, seed) for name, each in zip(kinds, ratios, strict=True)}


def bounded(prepared: Prepared, one: Subject, canaries: int) -> Bounded:
    """The lower bound on the epsilon of a generator like this client's."""
    generator, n_classes, seed = recipe(prepared.config).generator, prepared.dataset.classes, prepared.config.seed
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


def work(options: cli.Options, say: Callable[[str], None], on_step: OnStep | None = None) -> None:
    """The whole audit, written into ``--out``; with ``--dry-run`` only what it would take."""
    prepared, store = prepare(options.config), Store(Path(options.config.artifacts), say, options.config.storage)
    needs, jobs = prepared.needs, synthetic_pool.missing(store, prepared.needs)
    if not any(need.n for need in needs):
        raise UserError("no client draws an image, so nothing can be audited: use a larger sharing.p.")
    one = max(range(len(needs)), key=lambda i: len(needs[i].examples)) if options.attacked is None else options.attacked
    if not 0 <= one < len(needs):
        raise UserError(f"--attacked must be one of 0 ... {len(needs) - 1}, got {one}.")
    held_out, dealt = prepared.dataset.test, prepared.dealt
    if len(held_out) < FEWEST:
        raise UserError(
            f"an audit needs at least {FEWEST} test images, which are held out, and data set "
            f"{prepared.config.data.name} has {len(held_out)}."
        )
    pool.subjects(dealt, needs, held_out)  # refuses before any work
    say(f"{len(jobs)} generators to train, then {options.shadows} shadows and 2 with canaries, like client {one}'s.")
    if options.dry_run:
        attackers = generators(needs[one], held_out, options.shadows, options.canaries)
        seconds = planned.generators([*jobs, *attackers])
        say(f"In all about {planned.duration(seconds)} here on one core, without the comparison of images.")
        return
    out, smoke = Path(options.out), options.preset == "smoke"
    with fresh_torch():
        set_up_process()
        made = synthetic_images(prepared, store, jobs, say, on_step)
        subjects = pool.subjects(dealt, needs, held_out, [contribution.examples for contribution in made])
        found = audit(subjects, pool.spaces(classifier(prepared)), dealt.seed)
        found_out = attacked(prepared, subjects[one], options.shadows, say)
        say("two generators with and without canaries")
        bound = bounded(prepared, subjects[one], options.canaries)
    record: dict[str, Any] = {
        "spaces": found.record(),
        "validation": len(prepared.dataset.validation),
        "client": one,
        "attacks": {name: attack.record() for name, attack in found_out.items()},
        "epsilon": {"at_least": bound.audited.bound, "ceiling": bound.audited.ceiling, "guesses": bound.audited.r,
                    "right": bound.audited.v, "canaries": bound.audited.m, "reported": bound.reported,
                    "verdict": bound.verdict},
    }  # fmt: skip
    text = pictures.table(record["spaces"]) + "\n\n" + pictures.words(record, options.shadows)
    write_text(out / "audit_pool.md", f"**{presets.SMOKE}**\n\n{text}" if smoke else text)
    write_json(out / "audit_pool.json", record)
    title = f"membership in the training of a generator like client {one}'s, {options.shadows} generators"
    pictures.roc(out / "audit_pool_roc.png", found_out, title, smoke)
    pictures.closest_pairs(out / "audit_pool_pairs.png", found.compared["pixels"], smoke)
    say("\n" + text)
