r"""LoRA: low-rank adapters on a frozen backbone; clients send adapters and head only (arXiv:2106.09685).

A linear layer W x of the backbone becomes W x + B A x (alpha / r), with trained matrices A (r x d_in), drawn at random,
and B (d_out x r), zero at the start. Frozen parameters are neither sent nor counted. The file of the backbone has no
adapters, so it is not loaded strictly. With ``fedcommons[peft]``, ``--lora.by_peft true`` lets peft make the adapters.

python examples/lora.py        trains the whole network, then adapters of rank 1 and 4, and prints accuracy and bytes
python sweeps/run.py --model examples/lora.py:LoRA --lora.rank 0 --alpha 10 --out runs/backbone
python sweeps/run.py --model examples/lora.py:LoRA --lora.rank 4 --model.weights runs/backbone/model.safetensors \
    --model.weights_map "network.body.1.=body.1.base.,network.body.3.=body.3.base." --model.weights_strict false
"""

from math import prod
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import torch
from torch import Tensor, nn

from fedcommons import experiment, run

QUICK = {"federation.rounds": 2, "client.epochs": 1, "data.limit": 200, "measure.every": 0, "wandb": "off"}


class Adapted(nn.Module):
    """A frozen linear layer with a trained update of rank ``rank``."""

    def __init__(self, base: nn.Linear, rank: int, alpha: float) -> None:
        super().__init__()
        self.base, self.scale = base.requires_grad_(False), alpha / rank
        self.a = nn.Parameter(torch.randn(rank, base.in_features) / base.in_features**0.5)
        self.b = nn.Parameter(torch.zeros(base.out_features, rank))

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.scale * (x @ self.a.T @ self.b.T)


def adapt(body: nn.Module, rank: int, alpha: float, by_peft: bool) -> nn.Module:
    """Freeze a network and give its linear layers adapters: ``Adapted`` layers, or those of peft."""
    names = [name for name, layer in body.named_modules() if isinstance(layer, nn.Linear)]
    if by_peft:
        from peft import LoraConfig, inject_adapter_in_model  # pyright: ignore[reportMissingImports]

        return inject_adapter_in_model(LoraConfig(r=rank, lora_alpha=alpha, target_modules=names), body)
    body.requires_grad_(False)
    for name in names:
        body.set_submodule(name, Adapted(body.get_submodule(name), rank, alpha))  # pyright: ignore[reportArgumentType]
    return body


class LoRA(nn.Module):
    """A network with two hidden layers, and a head.

    Args:
        rank: r, rank of the adapters; 0: no adapters, the whole network is trained
        alpha: scale of the adapters, which is divided by r
        by_peft: whether the library peft makes the adapters
    """

    def __init__(
        self,
        shape: tuple[int, ...],
        n_classes: int,
        rank: Annotated[int, "[0, 4096]"] = 4,
        alpha: float = 8.0,
        by_peft: bool = False,
    ) -> None:
        super().__init__()
        layers = [nn.Flatten(), nn.Linear(prod(shape), 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU()]
        self.body = adapt(nn.Sequential(*layers), rank, alpha, by_peft) if rank else nn.Sequential(*layers)
        self.last = nn.Linear(64, n_classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.body(x))


if __name__ == "__main__":
    with TemporaryDirectory() as folder:
        values = {**QUICK, "model": f"{__file__}:LoRA"}
        for rank in (0, 1, 4):
            out, fields = Path(folder) / str(rank), {**values, "model.rank": rank, "alpha": 0.1 if rank else 10.0}
            if rank:
                fields["model.weights"] = str(Path(folder) / "0" / "model.safetensors")
                fields["model.weights_map"] = "network.body.1.=body.1.base.,network.body.3.=body.3.base."
                fields["model.weights_strict"] = False
            result = run(experiment("smoke", values=fields), out, say=lambda text: None)
            accuracy, sent = result.summary["last_accuracy"], result.rounds["comm/up_bytes"].iloc[-1]
            print(f"rank {rank or 'full'}: accuracy {accuracy:.2f}, {sent:,.0f} bytes up in a round")
