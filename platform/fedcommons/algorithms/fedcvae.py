"""FedCVAE: clients send decoders and label histograms once; the server trains its model on images sampled from them.

Heinbaugh, Luz-Ricca and Shao, "Data-free one-shot federated learning under very high statistical heterogeneity", ICLR
2023, and its released code (ceh-2000/fed_cvae).   x: server model;  g_i: client i's decoder, of a class-conditional
variational autoencoder;  g: decoder distilled on the server;  q(z | x_j): the encoder's code distribution of image x_j;
n_i: client i's number of images, n = sum_i n_i;  p_i: histogram of client i's labels;  z: a code, of independent
N(0, 1) numbers truncated to [-w, w];  S: ``samples``, number of synthetic images;  R: reconstruction loss.

    client, in round 1:  encoder, g_i <- argmin R(x_j, g_i(z_j, y_j)) + beta KL(q(z_j | x_j) || N(0, I))
    Ens:  int(S n_i / n) images g_i(z, y), y ~ p_i; the last client's decoder makes the remainder;  x learns from all S
    KD:   g <- argmin R(g_i(z, y), g(z, y)) at S triples (i, z, y) of Ens;  x learns from S images g(z, y), y uniform

The server trains for ``server_epochs`` epochs in each round, from round 1 on, and continues with Adam's moments. As
long as no decoder has arrived, all clients take part in each round; afterwards no client takes part. A client
downloads the number of classes, 8 bytes, and once uploads g_i with BatchNorm's statistics, n_i and p_i. No model is
sent, and no epsilon covers the uploads. Each client starts from different random weights.

Departs from the released code: images are uint8, and the model normalises them. The networks accept images of any
height and width, with padding. If a batch has one image, the image is duplicated. Example weights are ignored.
``norm_bias`` false removes the biases in front of BatchNorm. The 144,001 weights of the released decoder include these
biases, and Adam moves them by rounding noise.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import torch

from fedcommons.algorithms.fedcvae_decoders import Drawing, Networks, draw, learn, train
from fedcommons.algorithms.server_training import ServerTask
from fedcommons.core.algorithm import Facts, Message, Replies, Reply, State
from fedcommons.core.capabilities import Capabilities
from fedcommons.core.client_worker import Work
from fedcommons.core.executor import Executor
from fedcommons.core.local_training import onednn
from fedcommons.data.clients import ClientData
from fedcommons.errors import UserError
from fedcommons.flat_tensors import Flat, Payload, scalar, zeros_like
from fedcommons.flat_tensors import data as values
from fedcommons.privacy.release import Release


@dataclass(frozen=True)
class FedCVAE:
    """The server trains its model on synthetic images of the clients' decoders or of a decoder distilled from them."""

    capabilities: ClassVar[Capabilities] = Capabilities(
        needs_classes=True, distils=True, refuses_batch_norm=True, trains_locally=False, waits_for="images",
        repeats={"train_block": "local_epochs", "draw": "decoder_epochs", "learn": "server_epochs"},
    )  # fmt: skip

    variant: Annotated[str, "ens | kd"] = "ens"
    """synthetic images come from the clients' decoders (ens) or from a decoder distilled from them (kd)"""
    latent: Annotated[int, "[1, 1e6]"] = 10
    """length of a code"""
    truncate: Annotated[float | None, "[0.01, 100]"] = None
    """w, largest absolute value in the code of a synthetic image; default: 3 with ens, 1 with kd (paper, MNIST)"""
    channels: Annotated[tuple[int, ...], "[1, 1e6]"] = (32, 32, 64, 64)
    """channels of the encoder's convolutions, each of which halves the image; the decoder mirrors them"""
    hidden: Annotated[int, "[1, 1e6]"] = 500
    """width of the encoder's linear layer"""
    norm_bias: bool = True
    """whether convolutions before BatchNorm have biases, which have no effect but which Adam moves by rounding noise"""
    beta: Annotated[float, "[0, 1e38]"] = 1.0
    """weight of the divergence of the codes' distribution from N(0, I)"""
    local_epochs: Annotated[int, "[1, 1e9]"] = 15
    """epochs of a client's autoencoder (paper: MNIST 15, Fashion-MNIST 25, SVHN 50)"""
    local_lr: Annotated[float, "(0, 1e38]"] = 1e-3
    """learning rate of Adam for a client's autoencoder"""
    batch_size: Annotated[int, "[1, 1e9]"] = 32
    """number of images per training step, of a client's autoencoder and of the server's decoder"""
    samples: Annotated[int, "[1, 1e9]"] = 5000
    """number of synthetic images on which the server model is trained"""
    decoder_epochs: Annotated[int, "[1, 1e9]"] = 7
    """epochs of the server's decoder, with kd (paper: MNIST 7, Fashion-MNIST 10, SVHN 80)"""
    decoder_lr: Annotated[float, "(0, 1e38]"] = 0.01
    """learning rate of Adam for the server's decoder, with kd"""
    server_epochs: Annotated[int, "[1, 1e9]"] = 1
    """epochs of the server model in a round (paper: 10 in total for MNIST, 5 for other data)"""
    server_batch: Annotated[int, "[1, 1e9]"] = 32
    """synthetic images in a step of the server model"""
    server_lr: Annotated[float, "(0, 1e38]"] = 1e-3
    """learning rate of Adam for the server model"""

    def check(self, fields: Mapping[str, Any]) -> None:
        if fields["dp.local"]:
            raise UserError("fedcvae needs dp.local false: no noise protects the decoders that clients train and send.")
        if (share := fields["federation.participation"]) < 1:
            raise UserError(f"fedcvae needs federation.participation 1, got {share:g}: all clients send decoders once.")
        if fields["federation.buffers"] == "keep":
            raise UserError("fedcvae needs federation.buffers average: its clients train no model with buffers.")

    def start(self, model: Flat, facts: Facts, seed: int) -> State:
        levels = min(facts.shape[1:]).bit_length()  # maximum number of halvings, such as 5 for 28 pixels
        if not 1 <= len(self.channels) <= levels:
            raise UserError(
                f"fedcvae.channels must have 1 to {levels} levels for images {facts.shape}, got {len(self.channels)}."
            )
        zero, clients, classes = zeros_like(model), torch.tensor(facts.n_clients), torch.tensor(facts.n_classes)
        return {"model": model, "clients": clients, "classes": classes, "shape": torch.tensor(facts.shape),
                "first": zero, "second": zero, "steps": torch.tensor(0)}  # fmt: skip

    @property
    def bound(self) -> float:
        """Return w, the truncation bound: each number in a code is in [-w, w]."""
        return self.truncate or (1.0 if self.variant == "kd" else 3.0)

    def effective_constants(self, model: Flat, facts: Facts, epochs: int) -> dict[str, float]:
        """Return the truncation bound that a run uses: ``truncate``, or the variant's default if it is None."""
        return {"truncate": self.bound}

    def participants(self, state: State, round: int) -> Sequence[int]:
        """Return all clients until at least one decoder has arrived, then no client."""
        return range(0 if "images" in state else int(scalar(state, "clients")))

    def down(self, state: State, round: int, client: int) -> Message:
        return Message({"classes": state["classes"]})

    def client(self, work: Work, message: Message, memory: Payload, data: ClientData, round: int, seed: int) -> Reply:
        networks = self.networks(tuple(data.x.shape[1:]), message.common)
        with onednn(work.loop.onednn):
            decoder, loss = train(networks, self, data.x, data.y, work.share, seed)
        sent = {
            "decoder": decoder,
            "size": torch.tensor(len(data)),
            "histogram": torch.bincount(data.y, minlength=networks.n_classes),
        }
        release = Release(what=tuple(sent), n_disclosed=len(data), commons=True)
        return Reply(each=sent, weight=data.size, metrics={"loss": loss}, releases=[release])

    def merge(self, executor: Executor, state: State, total: Payload, replies: Replies, round: int, seed: int) -> State:
        if replies:
            networks = self.networks(tuple(values(state["shape"]).tolist()), state)
            task = Drawing(self, networks, [reply.each for reply in replies.values()])
            images, labels = executor.map(draw, task, [seed])[0]
            state = {**state, "images": images, "labels": labels}
        return {**state, **executor.map(learn, ServerTask(self, state, round), [seed])[0]}

    def networks(self, shape: tuple[int, ...], common: Payload) -> Networks:
        """Return the sizes of encoder and decoder for images of ``shape``; ``common`` has the number of classes."""
        return Networks(shape, int(scalar(common, "classes")), self.channels, self.latent, self.norm_bias)
