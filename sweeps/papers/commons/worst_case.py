"""Worst-case membership of a way: the attack on the images that its generators reveal most (``audits.exposed``).

The attacker has the images that a client sends, and knows all candidate images. Shadow generators are trained like the
generator of the client with most images, on the first seed. Ways with equal generators share the result.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from fedcommons.cli import parse
from fedcommons.cli.display import Display
from fedcommons.cli.parser import NewOption
from fedcommons.config.experiment import Experiment
from fedcommons.errors import UserError
from fedcommons.tune import cached_results
from fedcommons.tune.study import Entry
from papers.commons.ways import STAYS

if TYPE_CHECKING:  # torch takes seconds to import, and --help does not need it
    from fedcommons.runs.spec import RunSpec
    from fedcommons.tune.dry_run import ExtraJob
    from fedcommons.tune.sweep import Outcome, Todo

OPTION: NewOption = (
    "worst-case", Annotated[int | None, "[12, 10000]"], None,
    "shadow generators per attack on a way with generators (column worst-case membership); default: not "
    "measured",
)  # fmt: skip
KIND = "worst-case"
"""Key of the result in its file, and the beginning of the file's name."""


def attacked(entries: Sequence[Entry]) -> list[Experiment]:
    """Return the configuration of the first seed of each way and alpha whose clients send images of generators."""
    firsts: dict[tuple[str, float], Experiment] = {}
    for entry in entries:
        if not entry.is_tuning:
            firsts.setdefault((entry["way"], entry["alpha"]), entry.cell.config)
    return [config for config in firsts.values() if is_attacked(config)]


def is_attacked(config: Experiment) -> bool:
    """Return whether clients send images of generators."""
    return config.generator is not None and config.sharing.setting not in STAYS


def check(entries: Sequence[Entry]) -> None:
    """Check that the generators can be attacked; raises UserError."""
    from papers.fedssyn.attacks import checked

    if not (configs := attacked(entries)):
        raise UserError("--worst-case attacks generators of images, and none of --ways sends images of generators.")
    for config in configs:
        checked(config, None)


@dataclass(frozen=True, eq=False)
class Attack:
    """An attack on the generator of one client. facts: all inputs of the attack; file: where its result is."""

    prepared: "RunSpec"
    client: int
    facts: Mapping[str, Any]
    file: Path

    @staticmethod
    def build(config: Experiment, shadows: int, out: Path) -> "Attack":
        from fedcommons.storage.artifact_store import key_of
        from papers.fedssyn.attacks import checked

        prepared, client = checked(config, None)
        facts = {**prepared.requests[client].generator_facts, "client": client, "shadows": shadows}
        return Attack(prepared, client, facts, out / f"{KIND}-{key_of(facts)[:12]}.json")

    def result(self) -> dict[str, Any] | None:
        """Return the success of the attack (``exposed.Exposed.record``); None if it was not measured."""
        return cached_results.read(self.file, self.facts, KIND)


def read(config: Experiment, options: parse.Options, out: Path) -> dict[str, Any] | None:
    """Return the success of the attack on a way's generators; None if it was not measured."""
    is_open = options.worst_case and is_attacked(config)
    return Attack.build(config, options.worst_case, out).result() if is_open else None


def play(
    run: "Callable[..., Outcome]", entries: Sequence[Entry], options: parse.Options, todo: "Todo", out: Path,
    display: Display,
) -> "Outcome":  # fmt: skip
    """Run the trials by ``run``, then the attacks that have no result in ``out``."""
    outcome = run(entries, options, todo, out, display)
    for config in attacked(entries) if options.worst_case else ():
        attack = Attack.build(config, options.worst_case, out)
        if attack.result() is None:
            cached_results.write(attack.file, attack.facts, KIND, _measure(attack, options.worst_case, display))
    return outcome


def _measure(attack: Attack, shadows: int, display: Display) -> dict[str, Any]:
    from fedcommons.core.worker import fresh_torch, set_up_process
    from fedcommons.runs import pool_audit
    from papers.fedssyn import attacks

    prepared = attack.prepared
    with fresh_torch():
        set_up_process()
        subjects = pool_audit.subjects(prepared.client_data, prepared.requests, prepared.dataset.test)
        _, exposed = attacks.attacked(prepared, subjects[attack.client], shadows, display.say)["pool"]
    assert exposed is not None  # --worst-case has at least as many generators as the attack needs
    return exposed.record()


def extra_jobs(
    others: "Callable[..., Sequence[ExtraJob]]", entries: Sequence[Entry], options: parse.Options
) -> "list[ExtraJob]":
    """Return the jobs of ``others`` and the trainings of the shadow generators, whose duration a dry run estimates."""
    from fedcommons.tune.dry_run import ExtraJob

    planned = [Attack.build(c, options.worst_case, Path()) for c in attacked(entries)] if options.worst_case else []
    attacks, prices = {attack.file.stem: attack for attack in planned}, dict[tuple, Any]()
    return [
        *others(entries, options),
        *(ExtraJob(name, "shadow generators", partial(_seconds, attack, prices)) for name, attack in attacks.items()),
    ]


def _seconds(attack: Attack, prices: dict[tuple, Any]) -> float:
    from fedcommons.generators.image_cache import Job
    from fedcommons.tune import dry_run

    request = attack.prepared.requests[attack.client]
    return attack.facts["shadows"] * dry_run.generators(
        [Job([replace(request, labels=request.examples.y.repeat(2))], {})], prices
    )
