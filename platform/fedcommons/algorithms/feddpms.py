"""FedDPMS: clients receive images of their scarce classes, decoded from noisy mean codes of other clients.

Chen and Vikalo, "Federated learning in non-IID settings aided by differentially private synthetic data",
arXiv:2206.00686, algorithms 1 to 3.   x: encoder and classifier of the server model;  w_d: decoder;  D_i: client i's
data;  T_p: ``preliminary_rounds``;  n: ``classes``.

Stage I (rounds 1 to T_p): clients train encoder, classifier and decoder on the joint loss. The server averages x in
every round. Each client keeps its decoder until round T_p, in which the decoders' mean becomes the global w_d.

Stage II: clients train only x, on the cross entropy. *Sending* happens at a client's first selection in stage II, after
training. For each of its n most abundant classes, the client computes the mean code z of its images. It samples codes
from z + N(0, sigma^2 I) and decodes them by w_d. It sends up to ``quota`` codes whose image its model assigns to the
class. *Receiving* happens at a client's first selection at which other clients have sent codes of its scarce classes.
It receives the codes of the client whose abundant classes contain the most of its scarce classes, or of the ``helpers``
best such clients. The decoded images join D_i for all later rounds. The client trains on |D_i| examples sampled from
its data and these images.

With ``privacy`` paper, the noise is the paper's. No epsilon is certified for any sigma, for four reasons: codes are not
bounded; ``quota`` codes of one mean compose; the selection of codes depends on the data; and the paper's sensitivity
1/m, for m images of a class, is that of one coordinate.
With ``privacy`` sound, a client sends one mean per class, of codes clipped to norm C (``clip``), with noise of standard
deviation sigma C/m. The count m is public. A client's classes are disjoint, so all its means together cost one entry of
the privacy ledger (release). The *server's* encoder computes the codes, because the client's encoder has been trained
on all its data. The receiver samples codes around the means and uses those that the server's model recognises, which
costs no privacy. If the model recognises none, the client receives means again in its next round. Abundant and scarce
classes follow from class counts, which no epsilon covers.
``receive`` is for ablations. With real, a client sends at most ``quota`` real images per class instead of codes, which
shows the decoder's loss of quality. With nothing, no client receives images, which shows the effect of the losses
alone.

Departs from the paper: ``federation.weighting`` sets the clients' weights; with samples, a client's weight is |D_i|,
including the images that joined. The server knows the scarce classes beforehand. A class without a recognised code does
not count as sent. Stage I lasts until the server has received a decoder. For the decay of the learning rate see
``fedvae``.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar

import torch
from torch import Tensor

from fedcommons.algorithms import latents
from fedcommons.core.algorithm import Facts, Message, Replies, Reply, State
from fedcommons.core.averaging import weighted_mean, weighted_reply
from fedcommons.core.capabilities import Capabilities
from fedcommons.core.client_worker import Work
from fedcommons.core.executor import Executor
from fedcommons.data.clients import ClientData
from fedcommons.errors import UserError
from fedcommons.flat_tensors import Flat, Payload, flat, put, scale, select, sub
from fedcommons.flat_tensors import data as data_of
from fedcommons.privacy.release import Release
from fedcommons.seeding import generator

NOT_CERTIFIED = (
    "not certified: codes are not bounded, many noisy codes of one mean compose, and which are kept depends on the data"
)
ABUNDANT = Release(what=("labels",), commons=True, reason="abundant and scarce classes follow a client's class counts")


@dataclass(frozen=True)
class FedDPMS:
    """FedAvg whose clients add images of their scarce classes, decoded from noisy codes of other clients.

    x <- x + sum_i w_i (y_i - x) / sum_i w_i.  x: server model;  w_i: client i's weight;  y_i: client i's model, trained
    from x on its data and, in stage II, the decoded images.

    Raises:
        UserError: a constant does not fit the federation, such as more ``classes`` than the data has.
    """

    capabilities: ClassVar[Capabilities] = Capabilities(
        adds_updates=True, needs=latents.AND_CROSS_ENTROPY, needs_classes=True
    )

    preliminary_rounds: Annotated[int | None, "[0, 1e9]"] = None
    """T_p, number of rounds in stage I, below federation.rounds; default: 40 % of federation.rounds"""
    classes: Annotated[int, "[1, 1e9]"] = 3
    """n, number of a client's most frequent classes (abundant), and also of its least frequent classes (scarce)"""
    quota: Annotated[int, "[1, 1e5]"] = 50
    """number of codes per abundant class that a client sends"""
    sigma: Annotated[float, "[0, 1e6]"] = 3.0
    """standard deviation of the noise on the mean code of m images; if `privacy` is sound, in units of clip/m"""
    tries: Annotated[int, "[1, 1e9]"] = 200
    """largest number of batches of `quota` codes that are sampled for a class"""
    privacy: Annotated[str, "paper | sound"] = "paper"
    """paper: noise as printed, which certifies no epsilon; sound: one noisy mean per class, with an epsilon"""
    clip: Annotated[float, "[1e-30, 1e30]"] = 5.0
    """C, maximum norm to which each code is clipped before codes are averaged (only with `privacy` sound)"""
    spread: Annotated[float, "[0, 1e38]"] = 1.0
    """standard deviation of the codes that a receiver samples around a mean (only with `privacy` sound)"""
    decay: Annotated[float, "(0, 1]"] = 1.0
    """factor by which the learning rate is multiplied after every 10 local epochs (paper: 0.5)"""
    helpers: Annotated[int, "[1, 1e9]"] = 1
    """largest number of clients whose codes one client receives"""
    receive: Annotated[str, "decoded | real | nothing"] = "decoded"
    """images that a client receives: decoded from codes; ablations: real images of the same classes, or nothing"""

    def check(self, fields: Mapping[str, Any]) -> None:
        if self.privacy == "sound" and self.receive == "real":
            raise UserError("feddpms.receive must not be real with feddpms.privacy sound: real images have no noise.")

    def effective_constants(self, model: Flat, facts: Facts, epochs: int = 0) -> dict[str, int]:
        """Return the number of rounds in stage I: ``preliminary_rounds``, or 40 % of all rounds if it is None."""
        rounds = self.preliminary_rounds
        return {"preliminary_rounds": round(0.4 * facts.rounds) if rounds is None else rounds}

    def start(self, model: Flat, facts: Facts, seed: int) -> State:
        last = self.effective_constants(model, facts)["preliminary_rounds"]
        if last >= facts.rounds:
            raise UserError(f"feddpms.preliminary_rounds must be below federation.rounds = {facts.rounds}, got {last}.")
        if self.privacy == "sound" and self.sigma == 0:
            raise UserError("feddpms.sigma must be above 0 with feddpms.privacy sound, as only noise gives an epsilon.")
        if facts.counts is None:
            raise UserError("feddpms needs each client's number of examples per class (Facts.counts), got None.")
        counts = facts.counts()
        if self.classes > counts.shape[1]:
            raise UserError(f"feddpms.classes must be at most the {counts.shape[1]} classes, got {self.classes}.")
        return {
            "model": model,
            "last": torch.tensor(last),
            "second": torch.tensor(last == 0),  # True in stage II
            "scarce": latents.scarce(counts, self.classes),
            "received": torch.tensor([], dtype=torch.int64),
        }

    def down(self, state: State, round: int, client: int) -> Message:
        model = flat(state, "model")
        decoder = [name for name in model if name.startswith("decoder.")]
        common = {"model": select(model, [name for name in model if name not in decoder])}
        if not data_of(state["second"]):
            ask = {"ask": torch.ones(1, dtype=torch.uint8)} if round >= int(data_of(state["last"])) else {}
            return Message({**common, **ask})
        per_client: dict[str, Flat | Tensor] = {}
        if f"codes/{client}" not in state:
            per_client["decoder"] = select(model, decoder)
        if helpers := self._helpers(state, client):
            per_client |= {n: torch.cat([data_of(state[f"{n}/{j}"]) for j in helpers]) for n in ("codes", "labels")}
        return Message({**common, "second": torch.ones(1, dtype=torch.uint8)}, per_client)

    def client(self, work: Work, message: Message, memory: Payload, data: ClientData, round: int, seed: int) -> Reply:
        stage = self._second if "second" in message.common else self._first
        return stage(work, message, memory, data, round, seed)

    def _first(self, work: Work, message: Message, memory: Payload, data: ClientData, round: int, seed: int) -> Reply:
        """Run a client's round of stage I: train on the joint loss; in the stage's last round, send the decoder."""
        x, w = flat(message.common, "model"), work.weight(data)
        start = put(put(work.initial, flat(memory, "decoder")) if memory else work.initial, x)
        trained = work.local(start, data, seed, lr=latents.decayed(work, self.decay, round))
        new_memory = {"decoder": select(trained.model, [name for name in trained.model if name not in x.layout.names])}
        names = list(trained.model) if "ask" in message.common else x.layout.names
        # The server adds the decoder's change to the same initial decoder.
        before = select(put(work.initial, x), names)
        return weighted_reply(before, trained._replace(model=select(trained.model, names)), w, memory=new_memory)

    def _second(self, work: Work, message: Message, memory: Payload, data: ClientData, round: int, seed: int) -> Reply:
        """Run a client's round of stage II: train on the cross entropy, and send and receive codes."""
        x, gives = flat(message.common, "model"), "decoder" in message.individual
        new_memory = {**memory, "decoder": message.individual["decoder"]} if gives else dict(memory)
        start = put(put(work.initial, flat(new_memory, "decoder")) if "decoder" in new_memory else work.initial, x)
        each, releases, augmented = {}, [], data
        if gives and self.privacy == "sound":
            work.load(start)
            each, protection = self._private_means(work, data)
            releases += [replace(protection, what=("codes",), commons=True), ABUNDANT]
        if "codes" in message.individual:
            work.load(start)
            joining = self._images(work, message.individual, data, seed)
            new_memory |= joining if len(joining["labels"]) else {}
            each |= {"served": torch.tensor(len(joining["labels"]) > 0)} if self.privacy == "sound" else {}
        if "images" in new_memory:
            augmented = latents.augmented(data, data_of(new_memory["images"]), data_of(new_memory["labels"]), seed)
            new_memory.pop("decoder", None)
        loss, lr = work.module.cross_entropy, latents.decayed(work, self.decay, round)
        y, metrics, spent = work.local(start, augmented, seed, loss=loss, lr=lr)  # pyright: ignore[reportArgumentType]
        w, delta = work.weight(augmented), sub(select(y, x.layout.names), x)
        if gives and self.privacy == "paper":
            work.load(put(y, flat(message.individual, "decoder")))  # undoes local training's change of the decoder
            each = self._codes(work, data, seed)
            seen = int(torch.isin(data.y, data_of(each["labels"])).sum())
            why = "raw images" if self.receive == "real" else NOT_CERTIFIED
            releases.append(Release(what=("codes", "labels"), reason=why, n_disclosed=seen, commons=True))
        # ``weight`` and ``served`` depend only on messages and the number of examples, so local training covers both.
        covered = {"delta": True, "weight": w not in (1, data.size), "served": "served" in each}
        releases = [spent.with_names(*(name for name, is_sent in covered.items() if is_sent)), *releases]
        return Reply({"delta": scale(delta, w)}, each, weight=w, memory=new_memory, metrics=metrics, releases=releases)

    def merge(self, executor: Executor, state: State, total: Payload, replies: Replies, round: int, seed: int) -> State:
        model = flat(state, "model")
        sent = select(model, flat(total, "delta").layout.names)
        after = {**state, "model": put(model, weighted_mean(sent, total, replies))}
        if not data_of(state["second"]):
            return {**after, "second": torch.tensor(round >= int(data_of(state["last"])))}
        for i, reply in replies.items():
            after |= {f"{name}/{i}": x for name, x in reply.each.items() if name != "served"}
        served = {i: bool(data_of(reply.each.get("served", torch.tensor(True)))) for i, reply in replies.items()}
        received = torch.tensor([i for i in replies if served[i] and self._helpers(state, i)], dtype=torch.int64)
        return {**after, "received": torch.cat([data_of(state["received"]), received])}

    def _helpers(self, state: State, client: int) -> list[int]:
        """Return the clients whose codes this client receives in this round; empty if it has received codes before."""
        if self.receive == "nothing" or (data_of(state["received"]) == client).any():
            return []
        classes_of = {
            int(n.partition("/")[2]): data_of(x).tolist() for n, x in state.items() if n.startswith("labels/")
        }
        return latents.assistants(client, data_of(state["scarce"])[client].tolist(), classes_of, self.helpers)

    def _codes(self, work: Work, data: ClientData, seed: int) -> dict[str, Tensor]:
        """Return the codes (or real images) and labels that a client sends once with ``privacy`` paper."""
        if self.receive == "real":
            return latents.real_images(data, self.classes, self.quota, seed)
        centres = [(c, z.mean(0)) for c, z in latents.codes_by_class(work, data, self.classes).items()]
        draws = generator(seed, "noise of codes")
        codes, labels = latents.sample_recognised_codes(work, centres, self.sigma, self.quota, self.tries, draws)
        return {"codes": codes, "labels": torch.tensor(labels).to(data.y)}

    def _private_means(self, work: Work, data: ClientData) -> tuple[dict[str, Tensor], Release]:
        """Return the means and labels that a client sends with ``privacy`` sound, and the ledger's entry (release)."""
        draws = work.noise.call("means", *data.columns).stream()
        class_codes = latents.codes_by_class(work, data, self.classes)
        means, releases = zip(
            *(latents.noisy_mean(z, self.clip, self.sigma, draws) for z in class_codes.values()), strict=True
        )
        protection = releases[0] if len(set(releases)) == 1 else Release()  # Unequal releases count as no guarantee.
        return {"codes": torch.stack(means), "labels": torch.tensor(list(class_codes)).to(data.y)}, protection

    def _images(self, work: Work, received: Payload, data: ClientData, seed: int) -> dict[str, Tensor]:
        """Return images, with labels, decoded from received codes, or from codes sampled around received means."""
        z, labels = data_of(received["codes"]), data_of(received["labels"])
        if self.receive == "real":
            return {"images": z, "labels": labels}
        if self.privacy == "sound":
            means, draws = zip(labels.tolist(), z, strict=True), generator(seed, "codes around means")
            z, around = latents.sample_recognised_codes(work, means, self.spread, self.quota, self.tries, draws)
            labels = torch.tensor(around).to(labels)
        return {"images": latents.decoded(work, z, data.x), "labels": labels}
