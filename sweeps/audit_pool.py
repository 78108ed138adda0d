"""Audits the synthetic images of a configuration: do its generators memorise, and does membership show?

python sweeps/audit_pool.py                    # digits, some minutes on a laptop
python sweeps/audit_pool.py --preset smoke     # the same code with smaller numbers
python sweeps/audit_pool.py --generator private_ddpm --generator.target_epsilon 10
"""

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from fedcommons.config import cli, parts, presets
from fedcommons.config.flat import generates
from fedcommons.errors import UserError
from fedcommons.files import write_json, write_text
from papers.fedssyn import authors


def arguments(argv: Sequence[str]) -> cli.Options:
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


def work(options: cli.Options, say: Callable[[str], None]) -> None:
    """Everything, written into ``--out``."""
    from fedcommons.artifacts import Store
    from fedcommons.audits import pool
    from fedcommons.audits.copies import audit
    from fedcommons.core.worker import fresh_torch, set_up_process
    from fedcommons.runs.build import prepare, synthetic_images
    from fedcommons.sharing import synthetic_pool
    from papers.fedssyn import attacks
    from papers.fedssyn import audits as pictures

    prepared, store = prepare(options.config), Store(Path(options.config.artifacts), say)
    needs, jobs = prepared.needs, synthetic_pool.missing(store, prepared.needs)
    one = max(range(len(needs)), key=lambda i: len(needs[i].examples)) if options.attacked is None else options.attacked
    if not 0 <= one < len(needs):
        raise UserError(f"--attacked must be one of 0 ... {len(needs) - 1}, got {one}.")
    held_out, dealt = prepared.dataset.test, prepared.dealt
    pool.subjects(dealt, needs, held_out)  # refuses before any work
    say(f"{len(jobs)} generators to train, then {options.shadows} shadows and 2 with canaries, like client {one}'s.")
    if options.dry_run:
        from fedcommons.sweeping import planned

        attackers = attacks.generators(needs[one], held_out, options.shadows, options.canaries)
        seconds = planned.generators([*jobs, *attackers])
        say(f"In all about {planned.duration(seconds)} here on one core, without the comparison of images.")
        return
    out, smoke = Path(options.out), options.preset == "smoke"
    with fresh_torch():
        set_up_process()
        made = synthetic_images(prepared, store, jobs, say)
        subjects = pool.subjects(dealt, needs, held_out, [contribution.examples for contribution in made])
        found = audit(subjects, pool.spaces(attacks.classifier(prepared)), dealt.flip)
        found_out = attacks.attacked(prepared, subjects[one], options.shadows, say)
        say("two generators with and without canaries")
        bound = attacks.bounded(prepared, subjects[one], options.canaries)
    record: dict[str, Any] = {
        "spaces": found.record(),
        "client": one,
        "attacks": {name: attack.record() for name, attack in found_out.items()},
        "epsilon": {"at_least": bound.audited.bound, "guesses": bound.audited.r, "right": bound.audited.v,
                    "canaries": bound.audited.m, "reported": bound.reported},
    }  # fmt: skip
    text = pictures.table(record["spaces"]) + "\n\n" + pictures.words(record, options.shadows)
    write_text(out / "audit_pool.md", f"**{presets.SMOKE}**\n\n{text}" if smoke else text)
    write_json(out / "audit_pool.json", record)
    title = f"membership in the training of a generator like client {one}'s, {options.shadows} generators"
    pictures.roc(out / "audit_pool_roc.png", found_out, title, smoke)
    pictures.closest_pairs(out / "audit_pool_pairs.png", found.compared["pixels"], smoke)
    say("\n" + text)


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
