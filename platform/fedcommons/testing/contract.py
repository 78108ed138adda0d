"""What every algorithm promises, as checks that are played on a tiny federation of handwritten digits.

    check_algorithm(MyAlgorithm(LocalSGD(epochs=2, batch_size=5)))

No check knows an algorithm by name. None is a bare ``assert``: what was violated must be said outside of pytest too,
and ``python -O`` leaves assertions out.
"""

import math
import pickle
from collections.abc import Callable, Collection
from copy import deepcopy
from dataclasses import fields, is_dataclass, replace
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory

from fedcommons.core.algorithm import Algorithm
from fedcommons.core.local import LocalSGD
from fedcommons.core.worker import fresh_torch
from fedcommons.errors import UserError
from fedcommons.federation import checkpoint, rounds
from fedcommons.federation.evaluation import evaluate
from fedcommons.federation.rejections import records, told
from fedcommons.federation.rounds import BUFFERS, Standing, answering
from fedcommons.tensors import EMPTY, Payload, data, flat
from fedcommons.testing.comparing import bits, differing, listed, raw, require
from fedcommons.testing.elsewhere import Apart, require_the_bits_of_one_process, require_the_same_of_ray
from fedcommons.testing.federations import Federation, digits
from fedcommons.testing.spy import Call, Spy


@fresh_torch()
def check_algorithm(algorithm: Algorithm, *, actors: int | None = None, only: Collection[str] = ()) -> None:
    """Play ``algorithm`` on a tiny federation, some seconds long, and see that it keeps every promise of ``CHECKS``.

    ``only``: the checks of these names, where one is being mended.
    ``actors``: compare with so many real Ray actors too, bit for bit; seconds more. The algorithm's own ``LocalSGD``
    trains; about two epochs of five images a step are enough for the loss to fall.

    Raises:
        AssertionError: a sentence for each check that failed, after the check's name.
    """
    checks: dict[str, Check] = {name: CHECKS[name] for name in only or CHECKS}
    if actors:
        checks["ray_actors_give_the_bits_of_one_process"] = lambda a: require_the_same_of_ray(
            varied(a, augment=True), digits(dropout=0.3), actors
        )
    violations: list[str] = []
    errors: list[Exception] = []
    for name, check in checks.items():
        try:
            check(algorithm)
        except UserError:
            raise  # this machine's fault: it has no room for the actors
        except Exception as error:
            said = str(error) if isinstance(error, AssertionError) else f"it raised {type(error).__name__}: {error}"
            violations.append(f"- {name}: {said}")
            errors.append(error)
    if violations:
        title = f"{type(algorithm).__name__} fails {len(violations)} of {len(checks)} checks"
        raise AssertionError("\n".join([title, *violations])) from errors[0]


def varied(algorithm: Algorithm, **local: bool) -> Algorithm:
    """The algorithm with these fields of its ``local`` replaced; itself if it has no ``LocalSGD`` of that name."""
    if is_dataclass(algorithm) and "local" in {f.name for f in fields(algorithm)}:
        current = getattr(algorithm, "local")  # noqa: B009 (the Protocol has no such field)
        if isinstance(current, LocalSGD):
            return replace(algorithm, local=replace(current, **local))
    return algorithm


def two_rounds_keep_names_shapes_and_types(algorithm: Algorithm) -> None:
    federation = digits()
    untrained = federation.model
    played = federation.play(algorithm, federation.plan(2))
    require([now.round for now, _ in played] == [1, 2], "two rounds were planned, and others were played")
    for now, facts in played:
        model, after = now.model, f"after round {now.round}"
        require(model.layout == untrained.layout, f"{after} names or shapes of the model are not the untrained one's")
        require(
            model.buffer.dtype == untrained.buffer.dtype,
            f"{after} the model is {model.buffer.dtype}, and the untrained one is {untrained.buffer.dtype}",
        )
        require(model.buffer.isfinite().all(), f"{after} the model has values that are not finite")
        _require_all_trained(now, facts, 5, after)


def the_loss_falls(algorithm: Algorithm) -> None:
    """That of softmax regression, which is convex: unlike on a deep network, no sound method may fail there."""
    federation = digits(sizes=(30, 40, 30, 40, 30), lr=0.2, linear=True)
    plan, executor = federation.plan(5), federation.serial(algorithm)
    sizes = {"train": len(federation.data.sets["train"])}
    models = federation.start(algorithm, plan).model, federation.play(algorithm, plan, executor)[-1][0].model
    before, after = (evaluate(executor, model, sizes)["train/loss"] for model in models)
    require(
        after < 0.8 * before,
        f"in 5 rounds the training loss of the server model went from {before:.3f} to {after:.3f}, not below 80 %",
    )


def same_seed_same_bits_other_seed_other_bits(algorithm: Algorithm) -> None:
    """The second time on a worker that has trained for another federation before."""
    federation, spy = digits(dropout=0.3), Spy(varied(algorithm, augment=True))
    used = federation.serial(spy)
    first, other, again = (
        bits(federation.play(spy, federation.plan(2, seed=seed), executor)[-1][0])
        for seed, executor in ((0, federation.serial(spy)), (1, used), (0, used))
    )
    require(
        first == again,
        f"the same seed gave other bits of {listed(differing(first, again))}: something is drawn from a generator "
        "that is not keyed by the seed, or kept outside of state and memory",
    )
    require(first["state/model"] != other["state/model"], "another seed gave the same model: the seed is not used")


def nothing_that_is_handed_in_is_changed(algorithm: Algorithm) -> None:
    federation, spy = digits(), Spy(algorithm)
    federation.play(spy, federation.plan(3))
    require(len(spy.calls) == 15, f"{len(spy.calls)} clients' rounds were played instead of 15")
    require(not spy.changed, f"it changed in place what it was given: {listed(sorted(spy.changed))}")


def what_a_client_returned_is_not_the_workers_buffer(algorithm: Algorithm) -> None:
    """The next client trains in that buffer: memory and replies that alias it would change afterwards."""
    federation, spy = digits(), Spy(algorithm)
    federation.play(spy, federation.plan(2))
    for call in spy.calls:
        later = differing(call.each, raw(call.reply.each)) + differing(call.kept or {}, raw(call.reply.memory or {}))
        require(
            not later,
            f"what a client returned in round {call.round} as {listed(later)} changed afterwards: is it the worker's "
            "own buffer, which LocalSGD returns and in which the next client trains? return a copy",
        )


def memory_is_never_sent(algorithm: Algorithm) -> None:
    """What a client has kept from earlier rounds is in no message to it or from it (numbers and zeros may coincide)."""
    federation, spy = digits(), Spy(algorithm)
    federation.play(spy, federation.plan(3))
    for call in spy.calls:
        kept = {call.handed[name] for name, x in call.memory.items() if data(x).numel() > 1 and data(x).any()}
        sent = (call.message.common, call.message.own, call.reply.sums, call.reply.each)
        found = [name for payload in sent for name, value in raw(payload).items() if value in kept]
        require(not found, f"{listed(found)}, which travelled in round {call.round}, is what the client had in memory")


def messages_replies_and_state_survive_pickling(algorithm: Algorithm) -> None:
    federation, spy = digits(), Spy(algorithm)
    state = federation.play(spy, federation.plan(2))[-1][0].state
    parts: dict[str, Payload] = {"the state": state}
    for call in spy.calls[-5:]:
        parts |= {"message.common": call.message.common, "message.own": call.message.own}
        parts |= {"sums": call.reply.sums, "each": call.reply.each, "memory": call.reply.memory or {}}
        for what, payload in parts.items():
            try:
                there = pickle.loads(pickle.dumps(payload))
            except Exception as error:
                raise AssertionError(f"{what} cannot be pickled: {type(error).__name__}: {error}") from error
            require(raw(there) == raw(payload), f"{what} has other numbers after pickling")


def all_clients_of_a_round_get_the_same_common(algorithm: Algorithm) -> None:
    """It travels once, to whoever asks first; what is one client's belongs into ``own``."""
    federation, spy = digits(), Spy(algorithm)
    federation.play(spy, federation.plan(2))
    for round in (1, 2):
        first, *others = (common for number, common in spy.common if number == round)
        unequal = sorted({name for common in others for name in differing(first, common)})
        require(not unequal, f"message.common differs from client to client in {listed(unequal)}: use message.own")


def bytes_are_those_of_the_tensors(algorithm: Algorithm) -> None:
    federation, spy = digits(), Spy(algorithm)
    played = federation.play(spy, federation.plan(2, participation=0.4))
    require(len(spy.calls) == 4, f"{len(spy.calls)} clients' rounds were played instead of 4")
    down, up = [_down(c) for c in spy.calls], [_up(c) for c in spy.calls]
    require(min(down) > 0, "a message to a client is empty, so what the client knows has not travelled as a message")
    require(min(up) > 0, "a client's reply is empty, so what the server learns has not travelled as a reply")
    for (_, facts), first in zip(played, (0, 2), strict=True):
        for way, sizes in (("down", down), ("up", up)):
            counted, there = facts[f"comm/{way}_bytes"], sum(sizes[first : first + 2])
            require(counted == there, f"{counted} bytes {way} were counted, and the tensors have {there}")
    traffic = played[-1][0].traffic
    require(
        (traffic.down, traffic.up, traffic.once) == (sum(down), sum(up), 0), f"the totals of bytes are wrong: {traffic}"
    )


def clients_with_one_sample_take_part(algorithm: Algorithm) -> None:
    federation = digits(sizes=(1, 6, 1))
    for drop_last in (False, True):
        played = federation.play(varied(algorithm, drop_last=drop_last), federation.plan(2))
        with_this = f"with clients of one sample and drop_last={drop_last}"
        for now, facts in played:
            _require_all_trained(now, facts, 3, f"{with_this}, in round {now.round}")
        (first, _), (last, _) = played
        require(last.model.buffer.isfinite().all(), f"{with_this} the model has values that are not finite")
        require(bits(first)["state/model"] != bits(last)["state/model"], f"{with_this} the model stands still")


def a_client_that_sits_out_keeps_its_memory(algorithm: Algorithm) -> None:
    """Two of five take part in a round."""
    federation = digits()
    _play_with_absent_clients(algorithm, federation, federation.plan(5, participation=0.4, seed=3))


def stragglers_change_nothing(algorithm: Algorithm) -> None:
    """Three of five are drawn, and one in two does not answer; in one round nobody does."""
    federation = digits()
    _play_with_absent_clients(algorithm, federation, federation.plan(5, participation=0.6, seed=52, straggling=0.5))


def continuing_from_a_checkpoint_is_never_having_stopped(algorithm: Algorithm) -> None:
    """All that counts is in the checkpoint: the rest is played by a fresh worker and a copy that has seen nothing."""
    federation, algorithm = digits(dropout=0.3), varied(algorithm, augment=True)
    later, plan, played = deepcopy(algorithm), federation.plan(4, participation=0.6), []
    with TemporaryDirectory() as folder:
        start, executor = federation.start(algorithm, plan), federation.serial(algorithm)
        for now, facts in rounds.run(algorithm, executor, plan, start):
            played.append((now, facts))
            if now.round == 2:
                checkpoint.save(Path(folder), now)
        whole = bits(played[-1][0])
        federation.play(algorithm, federation.plan(1, seed=1))  # what a module holds is now another federation's
        rest = federation.play(later, plan, start=checkpoint.load_latest(Path(folder)))
    unequal = differing(bits(rest[-1][0]), whole)
    require(
        not unequal,
        f"after a stop at round 2 of 4 there are other bits of {listed(unequal)}: it depends on something that is "
        "neither state nor memory, so no checkpoint holds it",
    )
    require(rest[-1][0].traffic == played[-1][0].traffic, "after a stop at round 2 of 4 other bytes are counted")
    require(
        [facts for _, facts in rest] == [facts for _, facts in played[2:]],
        "after a stop at round 2 of 4 clients report other metrics",
    )


def neither_the_worker_nor_the_order_decides_a_bit(algorithm: Algorithm) -> None:
    federation, algorithm = digits(dropout=0.3), varied(algorithm, augment=True)
    require_the_bits_of_one_process(algorithm, federation, Apart(federation, algorithm))


Check = Callable[[Algorithm], None]


def batch_norms_statistics_follow_the_policy(algorithm: Algorithm) -> None:
    """Averaged they travel with the model; kept they stay with their client. The algorithm sees them in neither."""
    federation = digits(batch_norm=True)
    initial = federation.work().initial_buffers
    sent = {}
    for keep in (False, True):
        spy, plan = Spy(algorithm), replace(federation.plan(2), keep_buffers=keep)
        executor = federation.serial(spy)
        start = replace(federation.start(spy, plan), buffers=EMPTY if keep else initial)
        played = federation.play(spy, plan, executor, start)
        now = played[-1][0]
        held = [flat(now.memory[i], BUFFERS) for i in range(5)] if keep else [now.buffers]
        require(
            all(x.buffer.isfinite().all() and not x.buffer.equal(initial.buffer) for x in held),
            "after two rounds BatchNorm's statistics are those of the untrained module, or not finite",
        )
        require(
            not any(BUFFERS in {*c.memory, *c.message.common, *c.message.own, *c.reply.sums} for c in spy.calls),
            f"it uses the name {BUFFERS!r}, which is the engine's",
        )
        again = federation.play(spy, plan, executor, start)[-1][0]
        require(bits(again) == bits(now), "a worker's past shows in BatchNorm's statistics")
        sent[keep] = played[-1][1]
    for way in ("down", "up"):
        more = sent[False][f"comm/{way}_bytes"] - sent[True][f"comm/{way}_bytes"]
        require(more == 5 * data(initial).nbytes, f"the statistics of 5 clients are counted as {more} bytes {way}")


CHECKS: dict[str, Check] = {
    check.__name__: check
    for check in (
        two_rounds_keep_names_shapes_and_types,
        the_loss_falls,
        same_seed_same_bits_other_seed_other_bits,
        nothing_that_is_handed_in_is_changed,
        what_a_client_returned_is_not_the_workers_buffer,
        memory_is_never_sent,
        messages_replies_and_state_survive_pickling,
        all_clients_of_a_round_get_the_same_common,
        bytes_are_those_of_the_tensors,
        clients_with_one_sample_take_part,
        a_client_that_sits_out_keeps_its_memory,
        stragglers_change_nothing,
        continuing_from_a_checkpoint_is_never_having_stopped,
        neither_the_worker_nor_the_order_decides_a_bit,
        batch_norms_statistics_follow_the_policy,
    )
}
"""What ``check_algorithm`` checks, by name."""


def _play_with_absent_clients(algorithm: Algorithm, federation: Federation, plan: rounds.Plan) -> None:
    """Whoever is not in a round has after it the memory it had before, and gets that back when it answers again."""
    spy, expected = Spy(algorithm), {}
    for now, facts in rounds.run(spy, federation.serial(spy), plan, federation.start(spy, plan)):
        joined, present = answering(plan, now.round)
        calls = dict(zip(present, (call for call in spy.calls if call.round == now.round), strict=True))
        for client, call in calls.items():
            wrong = differing(call.handed, expected.get(client, {}))
            require(not wrong, f"in round {now.round} client {client} did not get its memory back: {listed(wrong)}")
        expected |= {client: call.kept for client, call in calls.items() if call.kept is not None}
        wrong = differing({client: raw(kept) for client, kept in now.memory.items()}, expected)
        require(not wrong, f"round {now.round} of clients {present} left other memory than returned in {listed(wrong)}")
        if present:
            _require_all_trained(now, facts, len(joined), f"in round {now.round}, in which clients {present} answered")
        require(now.model.buffer.isfinite().all(), f"after round {now.round} the model has values that are not finite")


def _require_all_trained(now: Standing, facts: dict[str, float], clients: int, when: str) -> None:
    require(facts["clients"] == clients, f"{when} {facts['clients']} clients were drawn instead of {clients}")
    require(not now.rejected, f"{when} {told(records(now.rejected))}")
    require(math.isfinite(facts.get("train/loss", math.nan)), f"{when} the clients report no finite metric 'loss'")


def _down(call: Call) -> int:
    """Bytes of the message's tensors."""
    return sum(map(len, chain(raw(call.message.common).values(), raw(call.message.own).values())))


def _up(call: Call) -> int:
    """Bytes of the reply's tensors; memory stays, so it is not counted."""
    return sum(map(len, chain(raw(call.reply.sums).values(), raw(call.reply.each).values())))
