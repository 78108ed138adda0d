"""The audit of a pool of synthetic images: membership inference and canary attacks on the pool's generators."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from pytorch_lightning import LightningModule

from fedcommons.audits import membership, one_run
from fedcommons.audits.copies import audit
from fedcommons.audits.exposed import Exposed, worst_case
from fedcommons.audits.lower_bound import LowerBound
from fedcommons.audits.membership import Attack, Losing
from fedcommons.audits.nearest_neighbours import Subject
from fedcommons.audits.one_run import FEWEST, LOOKS
from fedcommons.cli import parse
from fedcommons.config.dotted import deciding
from fedcommons.config.experiment import Experiment
from fedcommons.core.client_worker import Work
from fedcommons.core.local_training import LocalSGD
from fedcommons.core.worker import fresh_torch, set_up_process
from fedcommons.data.clients import ClientData
from fedcommons.data.examples import Examples
from fedcommons.errors import UserError
from fedcommons.generators import image_cache
from fedcommons.generators.image_cache import Job
from fedcommons.generators.requests import GenerationRequest
from fedcommons.runs import pool_audit
from fedcommons.runs.assemble import OnStep, synthetic_images
from fedcommons.runs.build import build, module_of, recipe
from fedcommons.runs.spec import RunSpec
from fedcommons.seeding import numpy_generator, seed_for
from fedcommons.storage.artifact_store import Store
from fedcommons.tune import cached_results, dry_run
from papers.fedssyn import audits as pictures


def classifier(prepared: RunSpec) -> LightningModule:
    """Train the run's model on the validation images; the audit measures distances between the model's features."""
    validation, seed = prepared.dataset.validation, prepared.record.seed
    work = Work(module_of(prepared.record)(prepared.dataset), torch.device("cpu"), LocalSGD(20, 10))
    if len(validation):
        work.local(work.initial, ClientData(validation.x, validation.y), seed_for(seed, "classifier of an audit"))
    return work.module


def attacked(
    prepared: RunSpec, subject: Subject, shadows: int, say: Callable[[str], None]
) -> dict[str, tuple[Attack, Exposed | None]]:
    """Run membership inference attacks on ``shadows`` generators that are trained like the generator of ``subject``.

    Return for each attack its success on all images, and on the most exposed images.
    """
    generator, data, seed = recipe(prepared.record).generator, prepared.dataset, prepared.record.seed
    seen = subject.training[subject.matched]
    images = Examples(torch.cat([seen.x, subject.held_out.x]), torch.cat([seen.y, subject.held_out.y]))
    inside = membership.halves(images.y.numpy(), shadows, seed)
    kinds = {"pool": membership.by_pool, **({"loss": membership.by_loss} if isinstance(generator, Losing) else {})}
    scores = membership.scores(generator, images, inside, data.classes, seed, [*kinds.values()], data.flip, say)
    return {
        name: (membership.attack(membership.likelihood_ratios(each, inside), inside, seed),
               worst_case(each, inside, seed))
        for name, each in zip(kinds, scores, strict=True)
    }  # fmt: skip


def bounded(prepared: RunSpec, subject: Subject, canaries: int) -> tuple[float | None, LowerBound]:
    """Return the reported epsilon of a generator trained like the subject's, and a lower bound from canaries."""
    generator, n_classes, seed = recipe(prepared.record).generator, prepared.dataset.classes, prepared.record.seed
    by = membership.by_loss if isinstance(generator, Losing) else membership.by_pool
    test, delta = prepared.dataset.test, prepared.record.dp.delta
    some = test[numpy_generator(seed, "canaries").permutation(len(test))[:canaries]]
    return one_run.bound(generator, subject.training, some, n_classes, seed, by, delta=delta)


def generators(request: GenerationRequest, test: Examples, shadows: int, canaries: int) -> list[Job]:
    """Return the trainings of the attacks as jobs, whose duration a dry run estimates."""
    examples, some = request.examples, test[: min(canaries, len(test))]
    inside = Examples(torch.cat([examples.x, some.x[::2]]), torch.cat([examples.y, some.y[::2]]))
    labels = some.y[:1] if isinstance(request.recipe.generator, Losing) else some.y.repeat(LOOKS)
    shadow = Job([replace(request, labels=examples.y.repeat(2))], {})
    with_and_without = [Job([replace(request, examples=seen, labels=labels)], {}) for seen in (inside, examples)]
    return [*[shadow] * shadows, *with_and_without]


def checked(config: Experiment, asked: int | None) -> tuple[RunSpec, int]:
    """Return the prepared experiment and the number of the attacked client."""
    prepared = build(config)
    needs, held_out = prepared.requests, prepared.dataset.test
    if not any(need.n for need in needs):
        raise UserError("no client draws an image, so nothing can be audited: use a larger sharing.p.")
    client = max(range(len(needs)), key=lambda i: len(needs[i].examples)) if asked is None else asked
    if not 0 <= client < len(needs):
        raise UserError(f"--attacked must be one of 0 ... {len(needs) - 1}, got {client}.")
    if len(held_out) < FEWEST:
        raise UserError(
            f"an audit needs at least {FEWEST} test images, which are held out, and data set "
            f"{prepared.record.data.name} has {len(held_out)}."
        )
    pool_audit.subjects(prepared.client_data, needs, held_out)  # This fails before any work if no audit is possible.
    return prepared, client


def audited(
    prepared: RunSpec, client: int, options: parse.Options, say: Callable[[str], None], on_step: OnStep | None
) -> dict[str, Any]:
    """Run the audit of one seed, with attacks on ``client``; return the contents of tables and pictures as JSON."""
    config, needs = prepared.record, prepared.requests
    store = Store(Path(config.artifacts), say, config.storage)
    with fresh_torch():
        set_up_process()
        pool = synthetic_images(prepared, store, image_cache.missing(store, needs), say, on_step)
        images = [contribution.examples for contribution in pool]
        subjects = pool_audit.subjects(prepared.client_data, needs, prepared.dataset.test, images)
        result = audit(subjects, pool_audit.spaces(classifier(prepared)), prepared.client_data.seed)
        attacks = attacked(prepared, subjects[client], options.shadows, say)
        say("training two generators, with and without canaries")
        reported, bound = bounded(prepared, subjects[client], options.canaries)
    return {
        "spaces": result.record(),
        "validation": len(prepared.dataset.validation),
        "client": client,
        "attacks": {
            name: {**attack.record(), "roc": pictures.curve(attack), "worst": worst and worst.record()}
            for name, (attack, worst) in attacks.items()
        },
        "epsilon": {"at_least": bound.bound, "ceiling": bound.ceiling, "guesses": bound.r, "right": bound.v,
                    "canaries": bound.m, "reported": reported, "verdict": bound.verdict(reported)},
        "pairs": pictures.pairs(result.compared["pixels"]),
    }  # fmt: skip


def price(prepared: RunSpec, client: int, options: parse.Options, say: Callable[[str], None]) -> None:
    """Print how many generators the audit of one seed trains, and the estimated duration."""
    store = Store(Path(prepared.record.artifacts), say, prepared.record.storage)
    jobs = image_cache.missing(store, prepared.requests)
    attackers = generators(prepared.requests[client], prepared.dataset.test, options.shadows, options.canaries)
    seconds = dry_run.generators([*jobs, *attackers])
    say(
        f"Seed {prepared.record.seed}: {len(jobs)} generators to train, then {options.shadows} shadow generators and "
        f"2 for the canaries, like client {client}'s: about {dry_run.duration(seconds)} here on one core, without the "
        "comparison of images."
    )


def work(options: parse.Options, say: Callable[[str], None], on_step: OnStep | None = None) -> None:
    """Run the audits of all seeds, store each audit in ``--out``, and write the tables and pictures of all seeds."""
    out = Path(options.out)
    ready = {config.seed: checked(config, options.attacked) for config in options.configs}
    files = {seed: out / f"seed_{seed}.json" for seed in ready}
    if not options.resume and any(file.exists() for file in files.values()):
        raise UserError(f"--out: {out} holds audits already; add --resume to keep them or name another folder.")
    of_all = {"shadows": options.shadows, "canaries": options.canaries}
    facts = {s: {**deciding(prepared.record), "attacked": client, **of_all} for s, (prepared, client) in ready.items()}
    earlier = {seed: cached_results.read(files[seed], facts[seed], "audit") for seed in ready}
    records = {}
    for number, (seed, (prepared, client)) in enumerate(ready.items(), 1):
        if (record := earlier[seed]) is None:
            say(f"seed {seed} ({number} of {len(ready)})")
            record = audited(prepared, client, options, say, on_step)
            cached_results.write(files[seed], facts[seed], "audit", record)
        records[seed] = record
    say("\n" + pictures.report(records, options, out))
