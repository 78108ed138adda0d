"""The one local training loop: plain minibatch steps that drive the client's LightningModule."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from pytorch_lightning import LightningModule
from torch import Tensor

from fedcommons.data.augment import flip_and_crop
from fedcommons.data.clients import ClientData
from fedcommons.seeds import generator, set_default_generator
from fedcommons.tensors import Flat, layout_of


class Work:
    """What one process trains with: a LightningModule whose parameters are views over one flat buffer, its optimizer.

    Built once per process and used for one client after another.

    Raises:
        ValueError: the module has buffers in its state (BatchNorm statistics are nobody's yet), or
            ``configure_optimizers`` returns something else than one optimizer.
    """

    def __init__(self, module: LightningModule, device: torch.device) -> None:
        names = dict(module.named_parameters())
        if extra := sorted(set(module.state_dict()) - {n for n, _ in module.named_parameters(remove_duplicate=False)}):
            raise ValueError(f"a model with buffers cannot be federated: {', '.join(extra)}")
        self.module, self.device = module.to(device), device
        self.params = Flat(layout_of(names.items()), torch.cat([p.detach().reshape(-1) for p in names.values()]))
        for name, parameter in module.named_parameters():
            parameter.data = self.params[name]
        optimizer = module.configure_optimizers()
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise ValueError("configure_optimizers must return one torch optimizer: the rate is constant in a round")
        self.optimizer = optimizer

    def load(self, model: Flat) -> None:
        """Copy these weights into the module.

        Raises:
            ValueError: their names or shapes are not the module's.
        """
        if model.layout != self.params.layout:
            raise ValueError("the weights' names or shapes are not those of this process's module")
        with torch.no_grad():
            self.params.buffer.copy_(model.buffer)

    def snapshot(self) -> Flat:
        """A copy of the module's weights."""
        return Flat(self.params.layout, self.params.buffer.clone())


@dataclass(frozen=True)
class LocalSGD:
    """E epochs of minibatches in a fresh random order, keyed by (round, client, epoch)."""

    epochs: int
    batch_size: int
    drop_last: bool = False  # an incomplete batch is kept where it is the only one
    equal_work: bool = True  # fewer epochs for clients with shared data, so that steps stay about equal
    augment: bool = False

    def epochs_for(self, data: ClientData) -> int:
        """E' = max(1, floor(n_i E/(n_i + n~))), the authors' rule, where n~ examples are not the client's own."""
        if not self.equal_work or data.n_own is None:
            return self.epochs
        return max(1, self.epochs * data.n_own // len(data))

    def run(self, work: Work, start: Flat, data: ClientData, seed: int) -> tuple[Flat, Mapping[str, float | Tensor]]:
        """Train from ``start``; the trained weights are the worker's own buffer, overwritten by the next client."""
        module, optimizer, n, b = work.module, work.optimizer, len(data), self.batch_size
        work.load(start)
        optimizer.state.clear()  # momentum starts anew: the next client knows nothing of this one's
        set_default_generator(seed, "dropout")
        if not module.training:
            module.train()
        losses, steps = torch.zeros((), device=work.device), 0
        for epoch in range(self.epochs_for(data)):
            draws = generator(seed, "order", epoch)
            order = torch.randperm(n, generator=draws).to(work.device)
            shuffled = [t[order] for t in (data.x, data.y, data.weight) if t is not None]  # one gather, then views
            if self.augment:
                shuffled[0] = flip_and_crop(shuffled[0], draws)
            for first in range(0, n, b):
                if self.drop_last and 0 < first > n - b:
                    break
                loss = module.training_step(tuple(t[first : first + b] for t in shuffled), steps)
                assert isinstance(loss, Tensor)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                losses += loss.detach()
                steps += 1
        return work.params, {"loss": losses / steps, "steps": steps}
