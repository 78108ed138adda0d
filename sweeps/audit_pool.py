"""Audits the synthetic images of a configuration: do its generators memorise, and does membership show?

python sweeps/audit_pool.py                    # digits, some minutes on a laptop
python sweeps/audit_pool.py --preset smoke     # the same code with smaller numbers
python sweeps/audit_pool.py --generator private_ddpm --generator.target_epsilon 10
"""

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedcommons.config import cli, parts, presets
from fedcommons.config.flat import generates
from fedcommons.errors import UserError
from fedcommons.files import write_json, write_text
from papers.fedssyn import authors

if TYPE_CHECKING:  # torch takes seconds to import, and --help needs none
    from collections.abc import Callable

    from pytorch_lightning import LightningModule

    from fedcommons.data.examples import Examples
    from fedcommons.runs.build import Prepared
    from fedcommons.sharing.closeness import Subject
    from fedcommons.sharing.membership import Attack
    from fedcommons.sharing.needs import Need
    from fedcommons.sharing.one_run import Bounded
    from fedcommons.sharing.synthetic_pool import Job


def arguments(argv: Sequence[str]):
    """Options of the audit on top of every field of the experiment."""
    preset, dataset = cli.early(argv, "preset", "small"), cli.early(argv, "data.name", "digits")
    setting = {"sharing.setting": "shuffled_synthetic"}
    title = (__doc__ or "").partition("\n")[0]
    parser = cli.parser(title, argv, {**presets.preset(preset, dataset), **setting})
    few = preset == "smoke"
    for name, kind, default, text in (
        ("preset", str, "small", ", ".join(presets.PRESETS)),
        ("attacked", int | None, None, "the client whose generator is attacked; default: whose sees most images"),
        ("shadows", int, 3 if few else 12, "shadow generators of the membership attack"),
        ("canaries", int, 8 if few else 400, "test images at most for the bound on epsilon; half are trained on"),
        ("out", str, f"runs/audit-{preset}-{parts.label(dataset)}", "folder of the results"),
    ):
        parser.add_argument(f"--{name}", type=kind, default=default, help=text)
    parser.add_argument("--dry-run", action="store_true", help="say what would be trained, and stop")
    options = cli.parse(parser, argv)
    options.config = authors.settled(options.preset, cli.experiment(options), options.asked)
    if not generates(options.config.sharing.setting):
        raise UserError(f"sharing.setting {options.config.sharing.setting} makes no images, so nothing can be audited.")
    for name, least in (("shadows", 2), ("canaries", 4)):
        if options[name] < least:
            raise UserError(f"--{name} must be at least {least}, got {options[name]}.")
    return options


def classifier(prepared: "Prepared") -> "LightningModule":
    """The run's model, trained on the validation set, so on nothing that is compared in its feature space."""
    import torch

    from fedcommons.core.local import LocalSGD, Work
    from fedcommons.data.clients import ClientData
    from fedcommons.runs.build import build_module
    from fedcommons.seeds import seed_for

    of, seed = prepared.dataset.validation, prepared.config.seed
    work = Work(build_module(prepared.config, prepared.dataset), torch.device("cpu"), LocalSGD(20, 10))
    if len(of):
        work.local(work.initial, ClientData(of.x, of.y), seed_for(seed, "classifier of an audit"))
    return work.module


def attacked(prepared: "Prepared", one: "Subject", shadows: int, say: "Callable[[str], None]") -> "dict[str, Attack]":
    """The membership attacks on generators like this client's."""
    import torch

    from fedcommons.data.examples import Examples
    from fedcommons.runs.build import recipe
    from fedcommons.sharing import membership as m

    generator, data, seed = recipe(prepared.config).generator, prepared.dataset, prepared.config.seed
    seen = one.seen[one.matched]
    images = Examples(torch.cat([seen.x, one.held_out.x]), torch.cat([seen.y, one.held_out.y]))
    inside = m.halves(images.y.numpy(), shadows, seed)
    kinds = {"pool": m.by_pool, **({"loss": m.by_loss} if isinstance(generator, m.Losing) else {})}
    found = m.scores(generator, images, inside, data.n_classes, seed, [*kinds.values()], data.flip, say)
    return {name: m.attack(m.likelihood_ratios(s, inside), inside, seed) for name, s in zip(kinds, found, strict=True)}


def bounded(prepared: "Prepared", one: "Subject", canaries: int) -> "Bounded":
    """The lower bound on the epsilon of a generator like this client's."""
    from fedcommons.runs.build import recipe
    from fedcommons.seeds import numpy_generator
    from fedcommons.sharing import membership, one_run

    generator, n_classes, seed = recipe(prepared.config).generator, prepared.dataset.n_classes, prepared.config.seed
    by = membership.by_loss if isinstance(generator, membership.Losing) else membership.by_pool
    test, delta = prepared.dataset.test, prepared.config.dp.delta
    some = test[numpy_generator(seed, "canaries").permutation(len(test))[:canaries]]
    return one_run.bound(generator, one.seen, some, n_classes, seed, by, delta=delta)


def attackers(of: "Need", test: "Examples", options) -> "list[Job]":
    """What the attacks train and draw, for its price: shadows, and two with and without canaries."""
    import torch

    from fedcommons.data.examples import Examples
    from fedcommons.sharing.membership import Losing
    from fedcommons.sharing.one_run import LOOKS
    from fedcommons.sharing.synthetic_pool import Job

    own, some = of.examples, test[: min(options.canaries, len(test))]
    inside = Examples(torch.cat([own.x, some.x[::2]]), torch.cat([own.y, some.y[::2]]))
    drawn = some.y[:1] if isinstance(of.recipe.generator, Losing) else some.y.repeat(LOOKS)
    shadow = Job([replace(of, labels=own.y.repeat(2))], {})
    with_and_without = [Job([replace(of, examples=seen, labels=drawn)], {}) for seen in (inside, own)]
    return [*[shadow] * options.shadows, *with_and_without]


def work(options, say: "Callable[[str], None]") -> None:
    """Everything, written into ``--out``."""
    from fedcommons.artifacts import Store
    from fedcommons.core.worker import fresh_torch, set_up_process
    from fedcommons.runs import audits
    from fedcommons.runs.build import prepare, synthetic_images
    from fedcommons.sharing import synthetic_pool
    from fedcommons.sharing.audit import audit
    from papers.fedssyn import audits as pictures

    prepared, store = prepare(options.config), Store(Path(options.config.artifacts), say)
    needs, jobs = prepared.needs, synthetic_pool.missing(store, prepared.needs)
    one = max(range(len(needs)), key=lambda i: len(needs[i].examples)) if options.attacked is None else options.attacked
    if not 0 <= one < len(needs):
        raise UserError(f"--attacked must be one of 0 ... {len(needs) - 1}, got {one}.")
    held_out, dealt = prepared.dataset.test, prepared.dealt
    audits.subjects(dealt, needs, held_out)  # refuses before any work
    say(f"{len(jobs)} generators to train, then {options.shadows} shadows and 2 with canaries, like client {one}'s.")
    if options.dry_run:
        from fedcommons.sweeping import planned

        seconds = planned.generators([*jobs, *attackers(needs[one], held_out, options)])
        say(f"In all about {planned.duration(seconds)} here on one core, without the comparison of images.")
        return
    out, smoke = Path(options.out), options.preset == "smoke"
    with fresh_torch():
        set_up_process()
        made = synthetic_images(prepared, store, jobs, say)
        subjects = audits.subjects(dealt, needs, held_out, [contribution.examples for contribution in made])
        found = audit(subjects, audits.spaces(classifier(prepared)), dealt.flip)
        attacks = attacked(prepared, subjects[one], options.shadows, say)
        say("two generators with and without canaries")
        bound = bounded(prepared, subjects[one], options.canaries)
    record: dict[str, Any] = {
        "spaces": found.record(),
        "client": one,
        "attacks": {name: attack.record() for name, attack in attacks.items()},
        "epsilon": {"at_least": bound.audited.bound, "guesses": bound.audited.r, "right": bound.audited.v,
                    "canaries": bound.audited.m, "reported": bound.reported},
    }  # fmt: skip
    text = pictures.table(record["spaces"]) + "\n\n" + _words(record, options)
    write_text(out / "audit_pool.md", f"**{presets.SMOKE}**\n\n{text}" if smoke else text)
    write_json(out / "audit_pool.json", record)
    title = f"membership in the training of a generator like client {one}'s, {options.shadows} generators"
    pictures.roc(out / "audit_pool_roc.png", attacks, title, smoke)
    pictures.closest_pairs(out / "audit_pool_pairs.png", found.compared["pixels"], smoke)
    say("\n" + text)


def _words(record: dict[str, Any], options) -> str:
    from fedcommons.reports import tables

    e = record["epsilon"]
    reported = "none, as nothing protects it" if e["reported"] is None else f"{e['reported']:.3g}"
    attacks = [
        f"{name}: AUC {a['auc']:.3f} [{a['auc_interval'][0]:.3f}, {a['auc_interval'][1]:.3f}], TPR "
        f"{100 * a['tpr_at_1_percent_fpr']:.1f} % [{100 * a['tpr_interval'][0]:.1f}, "
        f"{100 * a['tpr_interval'][1]:.1f}] at 1 % FPR"
        for name, a in record["attacks"].items()
    ]
    notes = [
        "closer: share of made images that are closer to an image their generator saw than to any of as many held-out "
        "ones of the same classes, with a 95 % interval; 50 % if nothing was memorised. near: images below a distance "
        "that at most the expected number of fresh images would be below. copied: seen images with a made one that "
        "near, against held-out images with one.",
        "features: the embedding of the model, trained on the validation set. Held-out: test images, and the client's "
        "own that its generator did not see.",
        f"Membership, generators like client {record['client']}'s, {options.shadows} of them: {'; '.join(attacks)}.",
        f"One run with {e['canaries']} test images as canaries, {e['right']} of {e['guesses']} guesses right: epsilon "
        f"is at least {e['at_least']:.3g} (95 %), reported: {reported}.",
    ]
    return tables.numbered(notes)


def audit_pool(argv: Sequence[str]) -> int:
    started, options = time.perf_counter(), arguments(argv)
    print("Loading torch and the data ...", flush=True)
    from fedcommons.sweeping import folders

    def say(text: str) -> None:
        print(text, flush=True)

    if options.dry_run:
        work(options, say)
        return 0
    with folders.open_folder(Path(options.out)):
        work(options, say)
    print(f"Time: {time.perf_counter() - started:.0f} s. All in {options.out}.")
    return 0


if __name__ == "__main__":
    cli.main(audit_pool)
