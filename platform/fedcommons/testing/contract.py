"""Checks of the rules that every federated algorithm must follow, run on a tiny federation of handwritten digits.

    check_algorithm(MyAlgorithm(my_constant=0.1))

The checks are equal for all algorithms. They raise errors by ``comparing.require`` and not by ``assert`` statements,
because the message must describe the violation outside of pytest too, and ``python -O`` removes ``assert`` statements.
"""

import pickle
from collections.abc import Callable, Collection
from dataclasses import replace

import torch

from fedcommons.config.registry import KINDS
from fedcommons.convergence.laboratory import Laboratory
from fedcommons.core.algorithm import BUFFERS, Algorithm, ChoosesClients
from fedcommons.core.evaluation import ModelTask, evaluate
from fedcommons.core.executor import Executor
from fedcommons.core.local_training import LocalSGD
from fedcommons.core.worker import fresh_torch
from fedcommons.errors import ClientError, UserError, sentence, unknown
from fedcommons.federation.rounds import Plan
from fedcommons.federation.stragglers import Independent
from fedcommons.flat_tensors import EMPTY, Payload, data, flat
from fedcommons.testing.absent import LATE, play_with_absent_clients, require_all_trained, rounds_of
from fedcommons.testing.client_work import clients_at_once_train_as_one_after_another, its_work_can_be_priced
from fedcommons.testing.comparing import Results, bits, listed, raw, require, require_same
from fedcommons.testing.elsewhere import (
    Apart,
    require_the_bits_of_one_process,
    require_the_same_after_a_stop,
    require_the_same_of_ray,
)
from fedcommons.testing.federations import digits
from fedcommons.testing.on_device import check_on
from fedcommons.testing.personal import losses, models, personal_models_are_whole_and_asking_changes_nothing
from fedcommons.testing.sensitivity import what_leaves_a_client_moves_as_declared
from fedcommons.testing.spy import Spy, received, sent

Check = Callable[[Algorithm, LocalSGD], None]

LOCAL = LocalSGD(epochs=2, batch_size=5)
"""Settings of local training that is long enough for the training loss to fall in ``the_loss_falls``."""


@fresh_torch()
def check_algorithm(
    algorithm: Algorithm,
    *,
    local: LocalSGD = LOCAL,
    actors: int | None = None,
    device: str | None = None,
    private: bool = False,
    only: Collection[str] = (),
) -> None:
    """Run ``algorithm`` on a tiny federation for some seconds and check every rule in ``CHECKS``.

    Args:
        algorithm: the method to check.
        local: settings of the clients' local training.
        actors: number of Ray actors that train the clients again, with results of equal bits; None: no actors.
        device: a device on which the clients train in one more check: "pretend" (a simulated GPU, see ``on_device``) or
            torch's name of a device, such as "cuda"; None: no such check.
        private: also run the method with DP-SGD on two neighbouring data sets with the same noise. Each noisy sum may
            differ by its sensitivity and all other values must be equal, which detects false claims.
        only: names of the checks to run, for example while fixing a violation; empty: all checks.

    Raises:
        UserError: an argument is invalid, or the machine has too few resources for the actors.
        AssertionError: the message has the name of each failed check and a sentence on each violation.
    """
    if isinstance(algorithm, type):
        raise UserError(f"check_algorithm takes an object such as {(n := algorithm.__name__)}(), got the class {n}.")
    optional = {name: getattr(algorithm, name, None) for name in KINDS["algorithm"].reserved}  # None: no such function
    if wrong := [name for name, value in optional.items() if not (value is None or callable(value))]:
        raise UserError(f"{type(algorithm).__name__}: rename the constant {wrong[0]}, an optional method's name.")
    names = [only] if isinstance(only, str) else list(only)
    if wrong := [name for name in names if name not in CHECKS]:
        raise unknown("check", wrong[0], CHECKS)
    checks: dict[str, Check] = {name: CHECKS[name] for name in names or CHECKS}
    augmented = replace(local, augment=True)
    if actors:
        many = digits(dropout=0.3, method=algorithm).training(augmented)
        checks["ray_actors_give_the_bits_of_one_process"] = lambda a, _: require_the_same_of_ray(a, many, actors)
    if device:
        check_device, normed = check_on(device), digits(batch_norm=True, method=algorithm).training(augmented)
        checks[check_device.__name__] = lambda a, _: check_device(a, normed)
    if private:
        checks[what_leaves_a_client_moves_as_declared.__name__] = what_leaves_a_client_moves_as_declared
    violations, errors = list[str](), list[BaseException | None]()
    for name, check in checks.items():
        try:
            check(algorithm, local)
        except UserError:
            raise  # the cause is the machine, which has too few resources for the actors, and not the method
        except Exception as error:
            violation = str(error) if isinstance(error, AssertionError) else f"it failed: {sentence(error)}"
            violations.append(f"- {name}: {violation}")
            errors.append(error.__cause__ if isinstance(error, ClientError) else error)
    if violations:
        title = f"{type(algorithm).__name__} fails {len(violations)} of {len(checks)} checks"
        raise AssertionError("\n".join([title, *violations])) from errors[0]


def two_rounds_keep_names_shapes_and_types(algorithm: Algorithm, local: LocalSGD) -> None:
    federation = digits(method=algorithm).training(local)
    untrained, plan = federation.model, federation.plan(2)
    played = federation.run(algorithm, plan)
    require([now.round for now, _ in played] == [1, 2], "the run must have rounds 1 and 2, but it has other rounds")
    for after, model in [(f"after round {now.round}", m) for now, _ in played for m in models(algorithm, plan, now)]:
        require(model.layout == untrained.layout, f"{after} weights have other names or shapes than before training")
        kind, initial = model.buffer.dtype, untrained.buffer.dtype
        require(kind == initial, f"{after} the model has type {kind}, but the untrained model has {initial}")
        require(model.buffer.isfinite().all(), f"{after} the model has values that are not finite")
    require_all_trained(federation, algorithm, plan, played, "")


def the_loss_falls(algorithm: Algorithm, local: LocalSGD) -> None:
    """Check that 5 rounds (25 if the method chooses clients) lower softmax regression's convex loss by over 20 %."""
    federation = digits(sizes=(30, 40, 30, 40, 30), lr=0.2, linear=True, method=algorithm).training(local)
    plan, executor = federation.plan(25 if isinstance(algorithm, ChoosesClients) else 5), federation.serial(algorithm)
    ends = federation.start(algorithm, plan), federation.run(algorithm, plan, executor)[-1][0]
    before, after = (losses(federation, algorithm, executor, plan, now) for now in ends)
    for whose, loss in before.items():
        change = f"from {loss:.3f} to {after[whose]:.3f} in {plan.facts.rounds} rounds"
        require(after[whose] < 0.8 * loss, f"the training loss of {whose} went {change}, not below 80 %")


def same_seed_same_bits_other_seed_other_bits(algorithm: Algorithm, local: LocalSGD) -> None:
    """Check that equal seeds give equal bits, also on a worker used before, and that another seed gives other bits."""
    federation, spy = digits(dropout=0.3, method=algorithm).training(replace(local, augment=True)), Spy(algorithm)
    used = federation.serial(spy)
    first, other, again = (
        bits(federation.run(spy, federation.plan(2, seed=seed), executor)[-1][0])
        for seed, executor in ((0, federation.serial(spy)), (1, used), (0, used))
    )
    cause = "a random number does not depend on the seed alone, or a value is stored outside of state and memory"
    require_same(first, again, "the same seed gave other bits of", cause)
    same = first["state/model"] == other["state/model"] if "state/model" in first else first == other
    require(not same, "another seed gave the same model: the seed is not used")
    common, again = (each.data.clients.commons for each in (federation, federation.shared_by(algorithm)))
    require(not (common and again) or common.digest == again.digest, "the same seed gave other shared data")


def _recorded(
    algorithm: Algorithm, local: LocalSGD, rounds: int = 2, participation: float = 1.0
) -> tuple[Spy, Plan, Results]:
    """Run some rounds; return the recorded calls, the run's settings, and the results after each round."""
    federation, spy = digits(method=algorithm).training(local), Spy(algorithm)
    plan = federation.plan(rounds, participation)
    played = federation.run(spy, plan)
    n, expected = len(spy.calls), sum(len(present) for _, present in rounds_of(federation, algorithm, plan, played))
    require(n == expected, f"clients were called {n} times instead of {expected} times")
    return spy, plan, played


def nothing_that_is_handed_in_is_changed(algorithm: Algorithm, local: LocalSGD) -> None:
    spy, _, _ = _recorded(algorithm, local, rounds=3)
    require(not spy.changed, f"the method changed its arguments in place: {listed(sorted(spy.changed))}")


def what_a_client_returned_is_not_the_workers_buffer(algorithm: Algorithm, local: LocalSGD) -> None:
    """Check that replies share no memory with the buffer in which the worker trains all of its clients in turn."""
    spy, _, _ = _recorded(algorithm, local)
    cause = "return copies of the worker's buffer, which work.local returns and in which the next client trains"
    for call in spy.calls:
        for before, now in ((call.each, call.reply.each), (call.memory_copy or {}, call.reply.memory or {})):
            require_same(before, raw(now), f"a client's reply in round {call.round} changed afterwards in", cause)


def memory_is_never_sent(algorithm: Algorithm, local: LocalSGD) -> None:
    """Check that no message or reply has a tensor of the client's memory, except tensors of one element or of zeros."""
    spy, _, _ = _recorded(algorithm, local, rounds=3)
    for call in spy.calls:
        memory_bytes = {call.handed[name] for name, x in call.memory.items() if data(x).numel() > 1 and data(x).any()}
        travelled = (call.message.common, call.message.individual, call.reply.sums, call.reply.each)
        leaked = [name for payload in travelled for name, value in raw(payload).items() if value in memory_bytes]
        where = f"which was sent in round {call.round}"
        require(not leaked, f"{listed(leaked)}, {where}, equals a tensor of the client's memory")


def messages_replies_and_state_survive_pickling(algorithm: Algorithm, local: LocalSGD) -> None:
    spy, _, played = _recorded(algorithm, local)
    payloads: list[tuple[str, Payload]] = [("the state", played[-1][0].state)]
    for call in spy.calls[-5:]:
        message, reply = call.message, call.reply
        payloads += [("message.common", message.common), ("message.individual", message.individual)]
        payloads += [("sums", reply.sums), ("each", reply.each), ("memory", reply.memory or {})]
    for what, payload in payloads:
        try:
            unpickled = pickle.loads(pickle.dumps(payload))
        except Exception as error:
            raise AssertionError(f"{what} cannot be pickled: {type(error).__name__}: {error}") from error
        require(raw(unpickled) == raw(payload), f"{what} has other numbers after pickling")


def all_clients_of_a_round_get_the_same_common(algorithm: Algorithm, local: LocalSGD) -> None:
    """Check that ``Message.common`` is equal for all clients of a round; ``individual`` is for values of one client."""
    spy, _, _ = _recorded(algorithm, local)
    first = dict(reversed(spy.common))  # reversed, so that dict keeps the first entry of each round
    for round, common in spy.common:
        require_same(first[round], common, "message.common differs between clients in", "use message.individual")


def bytes_are_those_of_the_tensors(algorithm: Algorithm, local: LocalSGD) -> None:
    spy, plan, played = _recorded(algorithm, local, participation=0.4)
    down, up = [received(c) for c in spy.calls], [sent(c) for c in spy.calls]
    require(min(down, default=1) > 0, "a message to a client has no tensors, so the client's input was not sent")
    require(min(up, default=1) > 0, "a client's reply has no tensors, so the server's input was not sent")
    for now, facts in played:
        for way, size in (("down", received), ("up", sent)):
            counted, expected = facts[f"comm/{way}_bytes"], sum(size(c) for c in spy.calls if c.round == now.round)
            require(counted == expected, f"{counted} bytes {way} were counted, but the tensors have {expected} bytes")
    traffic = played[-1][0].traffic
    expected = sum(down), sum(up), plan.facts.counts_nbytes  # all clients send class counts if the method reads them
    is_total = (traffic.down, traffic.up, traffic.once) == expected
    require(is_total, f"the total bytes of the run differ from the bytes of the tensors: {traffic}")


def clients_with_one_sample_take_part(algorithm: Algorithm, local: LocalSGD) -> None:
    for drop_last in (False, True):
        federation = digits(sizes=(1, 6, 1), method=algorithm).training(replace(local, drop_last=drop_last))
        plan = federation.plan(2)
        played = federation.run(algorithm, plan)
        with_this = f"with clients of one sample and drop_last={drop_last}"
        require_all_trained(federation, algorithm, plan, played, f"{with_this}, ")
        (first, _), (last, _) = played
        before, after = (torch.stack([m.buffer for m in models(algorithm, plan, now)]) for now in (first, last))
        require(after.isfinite().all(), f"{with_this} the model has values that are not finite")
        require(not before.equal(after), f"{with_this} round 2 does not change the model")


def a_client_that_sits_out_keeps_its_memory(algorithm: Algorithm, local: LocalSGD) -> None:
    """Check that a client that does not take part keeps its memory; two of five clients take part in each round."""
    federation = digits(method=algorithm).training(local)
    play_with_absent_clients(algorithm, federation, federation.plan(5, participation=0.4, seed=3))


def stragglers_change_nothing(algorithm: Algorithm, local: LocalSGD) -> None:
    """Check that clients without a reply keep their memory (state between rounds), also if no client replies."""
    federation = digits(method=algorithm).training(local)
    plan = federation.plan(5, participation=0.6, seed=52, late=Independent(0.5))
    play_with_absent_clients(algorithm, federation, plan)


def late_clients_by_any_rule_break_no_promise(algorithm: Algorithm, local: LocalSGD) -> None:
    """Check memory, and equal bits after a checkpoint on other workers, if clients are late by the rules ``LATE``."""
    federation = digits(dropout=0.3, method=algorithm).training(replace(local, augment=True))
    plan = replace(federation.plan(5, participation=0.8, blocks=4, seed=8, late=LATE), take_partial=True)
    play_with_absent_clients(algorithm, federation, plan)
    require_the_same_after_a_stop(algorithm, federation, plan, Apart(federation, algorithm))


def continuing_from_a_checkpoint_is_never_having_stopped(algorithm: Algorithm, local: LocalSGD) -> None:
    """Check that a new worker and an unused copy of the algorithm continue from a checkpoint with equal bits."""
    federation = digits(dropout=0.3, method=algorithm).training(replace(local, augment=True))
    require_the_same_after_a_stop(algorithm, federation, federation.plan(4, participation=0.6))


def neither_the_worker_nor_the_order_decides_a_bit(algorithm: Algorithm, local: LocalSGD) -> None:
    federation = digits(dropout=0.3, method=algorithm).training(replace(local, augment=True))
    require_the_bits_of_one_process(algorithm, federation, Apart(federation, algorithm))


def what_a_module_draws_is_keyed_in_every_mode(algorithm: Algorithm, local: LocalSGD) -> None:
    """Check that a layer's random noise depends on seeds only, on any worker, in training, evaluation and measuring."""
    federation = digits(noise=0.5, method=algorithm).training(local)
    require_the_bits_of_one_process(algorithm, federation, Apart(federation, algorithm))
    at = ModelTask(federation.model, seed=1)
    sizes = {name: len(examples) for name, examples in federation.data.sets.items()}
    executors: tuple[Executor, ...] = (federation.serial(algorithm), Apart(federation, algorithm))
    for what, look in (
        ("evaluation", lambda executor: evaluate(executor, at, sizes)),
        ("measurement", lambda executor: Laboratory(executor, federation.data, 0.0, 2).measure(at)),
    ):
        in_process, elsewhere, again = (look(executor) for executor in (*executors, executors[0]))
        for other in (elsewhere, again):
            require_same(in_process, other, f"the {what} of a module with random layers differs between processes:")


def batch_norms_statistics_follow_the_policy(algorithm: Algorithm, local: LocalSGD) -> None:
    """Check that BatchNorm statistics are sent only if the server averages them, and that methods never get them."""
    federation = digits(batch_norm=True, method=algorithm).training(local)
    initial = federation.work().initial_buffers
    if not len(initial):
        return  # the method refuses BatchNorm, so the module has none
    sent = {}
    for keep in (False, True):
        spy, plan = Spy(algorithm), replace(federation.plan(2), keep_buffers=keep)
        executor = federation.serial(spy)
        start = replace(federation.start(spy, plan), buffers=EMPTY if keep else initial)
        played = federation.run(spy, plan, executor, start)
        now, answers = played[-1][0], rounds_of(federation, algorithm, plan, played, start)
        seen = {client for _, present in answers for client in present}
        statistics = [flat(now.memory[i], BUFFERS) for i in seen] if keep else [now.buffers]
        moved = all(x.buffer.isfinite().all() and not x.buffer.equal(initial.buffer) for x in statistics)
        require(moved, "after two rounds BatchNorm's statistics are those of the untrained module, or are not finite")
        for c in spy.calls:
            names = {*c.memory, *c.message.common, *c.message.individual, *c.reply.sums, *c.reply.each}
            require(BUFFERS not in names, f"the method uses the name {BUFFERS!r}, which is reserved for the engine")
        again = federation.run(spy, plan, executor, start)[-1][0]
        require(bits(again) == bits(now), "BatchNorm's statistics depend on the clients that the worker trained before")
        sent[keep] = played[0][1]
        clients = len(answers[0][0])
    for way in ("down", "up"):
        more = sent[False][f"comm/{way}_bytes"] - sent[True][f"comm/{way}_bytes"]
        message = f"the statistics of {clients} clients are counted as {more} bytes {way}"
        require(more == clients * data(initial).nbytes, message)


def all_that_is_sent_is_named_by_a_release(algorithm: Algorithm, local: LocalSGD) -> None:
    """Check that a privacy ledger entry (release) names each sent tensor, whether noise protects the tensor or not."""
    spy, _, _ = _recorded(algorithm, local)
    for call in spy.calls:
        named = {name for event in call.reply.releases for name in event.what}
        sent = {*call.reply.sums, *call.reply.each}
        bare, absent = sorted(sent - named), sorted(named - sent - {"weight"})
        advice = "add spent.with_names(...) for results of work.local, and Release(what=(...)) for others, to releases"
        require(not bare, f"no release names {listed(bare)}, which was sent in round {call.round}: {advice}")
        require(not absent, f"a release names {listed(absent)}, which was not sent in round {call.round}")


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
        late_clients_by_any_rule_break_no_promise,
        continuing_from_a_checkpoint_is_never_having_stopped,
        neither_the_worker_nor_the_order_decides_a_bit,
        what_a_module_draws_is_keyed_in_every_mode,
        batch_norms_statistics_follow_the_policy,
        all_that_is_sent_is_named_by_a_release,
        its_work_can_be_priced,
        personal_models_are_whole_and_asking_changes_nothing,
        clients_at_once_train_as_one_after_another,
    )
}
"""The functions that ``check_algorithm`` runs, by name."""
