"""Denoising diffusion model, conditional on the class (Ho et al., NeurIPS 2020, arXiv:2006.11239).

Training minimises E ||eps - eps_theta(sqrt(abar_t) x + sqrt(1 - abar_t) eps, t, y)||^2 over t uniform in 0..T-1.
x: an image;  y: its class;  t: time;  T: number of diffusion steps;  eps: noise, N(0, I);  eps_theta: the network;
beta_t: variance of the noise added in step t;  abar_t: product of 1 - beta_s over times s <= t.

Instead of eps the network may predict x, or v = sqrt(abar_t) eps - sqrt(1 - abar_t) x (Salimans and Ho, ICLR 2022,
arXiv:2202.00512). In the first steps of sampling, an error of eps is multiplied by 1/sqrt(abar_t) in the image, an
error of x or v by at most 1. So with gradients as noisy as in DP-SGD, a network that predicts x or v gives images after
far fewer training steps than one that predicts eps.
"""

from collections.abc import Callable
from functools import cached_property
from typing import Any

import torch
from diffusers.models.unets.unet_2d import UNet2DModel
from diffusers.schedulers.scheduling_ddim import DDIMScheduler
from diffusers.schedulers.scheduling_ddpm import DDPMScheduler
from diffusers.training_utils import EMAModel
from pytorch_lightning import LightningModule
from torch import Tensor
from torch.nn import functional as F


class DDPM(LightningModule):
    """A U-Net that predicts noise, image or v, and the moving average of its weights, which is used for sampling.

    shape: (C, H, W) of an image. channels: channels of the U-Net's levels. timesteps: number of diffusion steps.
    snr_gamma: limit of min-SNR loss weights; None: equal weights. A batch is (x, y): x uint8 (B, C, H, W), y (B,)
    classes. One generator on the module's device, seeded with ``seed``, makes all random numbers. So a GPU does not
    wait for the CPU's numbers. Runs on GPU and CPU use different random numbers.
    """

    def __init__(
        self,
        *,
        shape: tuple[int, ...],
        n_classes: int,
        channels: tuple[int, ...],
        lr: float,
        timesteps: int = 1000,
        schedule: str = "linear",
        prediction: str = "epsilon",
        ema_decay: float = 0.9995,
        snr_gamma: float | None = None,
        flip: bool = False,
        seed: int = 0,
    ) -> None:
        super().__init__()
        levels = len(channels)
        self.shape, self.lr, self.flip = shape, lr, flip
        self.unet = UNet2DModel(
            sample_size=shape[1:],  # pyright: ignore[reportArgumentType]  (diffusers takes a pair)
            in_channels=shape[0],
            out_channels=shape[0],
            block_out_channels=channels,
            down_block_types=("DownBlock2D",) * levels,
            up_block_types=("UpBlock2D",) * levels,
            layers_per_block=1,
            norm_num_groups=8,
            num_class_embeds=n_classes,
        )
        self.prediction, self.snr_gamma = prediction, snr_gamma
        self.schedule = DDPMScheduler(  # Keywords are needed, as from_config would lose positional arguments.
            num_train_timesteps=timesteps,
            beta_schedule=schedule,  # pyright: ignore[reportArgumentType]
            prediction_type=prediction,  # pyright: ignore[reportArgumentType]
        )
        # EMAModel copies the weights in the first step. In step k, its decay is min(ema_decay, (1 + k)/(10 + k)), so
        # that the initial weights do not dominate after few steps.
        self.average = EMAModel(self.unet.parameters(), decay=ema_decay, foreach=True)
        self.seed, self._generator = seed, None

    @property
    def generator(self) -> torch.Generator:
        """Return the random generator for training; use it only after the module has moved to its device."""
        if self._generator is None:
            self._generator = torch.Generator(self.device).manual_seed(self.seed)
        return self._generator

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Return the (weighted) mean squared error of the network's prediction for the batch."""
        return self(*batch, *self.draw(len(batch[0])))

    def draw(self, n: int) -> tuple[Tensor, ...]:
        """Draw times (n,), noise (n, C, H, W) and, with ``flip``, whether to mirror each of n images, (n, 1, 1, 1)."""
        place: Any = {"generator": self.generator, "device": self.device}
        t = torch.randint(len(self.schedule), (n,), **place)
        draws = t, torch.randn(n, *self.shape, **place)
        return (*draws, torch.rand(n, 1, 1, 1, **place) < 0.5) if self.flip else draws

    def forward(
        self, images: Tensor, labels: Tensor, t: Tensor, noise: Tensor, mirrored: Tensor | None = None
    ) -> Tensor:
        """Return the mean loss at times t (B,) with ``noise`` (B, C, H, W); mirrored: images to mirror (B, 1, 1, 1)."""
        x = images / 127.5 - 1
        if mirrored is not None:
            x = torch.where(mirrored, x.flip(-1), x)
        noisy = self.schedule.add_noise(x, noise, t)  # pyright: ignore[reportArgumentType]  (annotated IntTensor)
        predicted, target = self.unet(noisy, t, class_labels=labels).sample, self._target(x, noise, t)
        if self.snr_gamma is None:
            return F.mse_loss(predicted, target)
        return (self.time_weights[t] * (predicted - target).square().flatten(1).mean(1)).mean()

    @cached_property
    def time_weights(self) -> Tensor:
        """Return min-SNR loss weights per time, (T,) (Hang et al., ICCV 2023, arXiv:2303.09556, section 3.4).

        SNR: signal-to-noise ratio of the noisy image. gamma: ``snr_gamma``. The weight is min(SNR, gamma) if the
        network predicts the image, min(SNR, gamma)/SNR if it predicts noise, and min(SNR, gamma)/(SNR + 1) if it
        predicts v. So an error of the image has the same weight in all three cases.
        """
        abar = self.schedule.alphas_cumprod.double()
        snr = abar / (1 - abar)
        of_image = {"epsilon": snr, "sample": torch.ones_like(snr), "v_prediction": snr + 1}[self.prediction]
        return (snr.clamp(max=self.snr_gamma) / of_image).float().to(self.device)

    def _target(self, x: Tensor, noise: Tensor, t: Tensor) -> Tensor:
        """Return the target of the network's prediction: the noise, the image x or v, with the shape of x."""
        if self.prediction != "v_prediction":
            return {"epsilon": noise, "sample": x}[self.prediction]
        return self.schedule.get_velocity(x, noise, t)  # pyright: ignore[reportArgumentType]

    @torch.no_grad()
    def losses(self, images: Tensor, labels: Tensor, seed: int, *, draws: int = 16) -> Tensor:
        """Return each image's mean squared error, (n,), over ``draws`` evenly spaced times, with one noise per time."""
        self.eval()
        generator = torch.Generator(self.device).manual_seed(seed)
        noises = torch.randn(draws, 1, *self.shape, generator=generator, device=self.device)
        times = ((torch.arange(draws) + 0.5) * len(self.schedule) / draws).long().to(self.device)
        image_losses = []
        for x, y in zip(images.to(self.device).split(256), labels.to(self.device).split(256), strict=True):
            x, batch_losses = x / 127.5 - 1, torch.zeros(len(y), device=self.device)
            for t, noise in zip(times.view(-1, 1), noises, strict=True):
                batch_times, eps = t.expand(len(y)), noise.expand(len(y), *self.shape)
                noisy = self.schedule.add_noise(x, eps, batch_times)  # pyright: ignore[reportArgumentType]
                predicted = self.unet(noisy, batch_times, class_labels=y).sample
                batch_losses += (predicted - self._target(x, eps, batch_times)).square().flatten(1).mean(1) / draws
            image_losses.append(batch_losses)
        return torch.cat(image_losses)

    def on_fit_start(self) -> None:
        self.average.to(self.device)  # EMAModel is no Module, so Lightning does not move it.

    def on_train_batch_end(self, *_: object) -> None:
        self.average.step(self.unet.parameters())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return Adam with a constant learning rate."""
        return torch.optim.Adam(self.unet.parameters(), self.lr, fused=True)

    def averaged(self) -> dict[str, Tensor]:
        """Return the U-Net's state dict with the averaged weights, on the CPU, as sampling uses it."""
        parameters = list(self.unet.parameters())
        self.average.store(parameters)
        self.average.copy_to(parameters)
        state = {name: t.detach().cpu().clone() for name, t in self.unet.state_dict().items()}
        self.average.restore(parameters)
        return state

    @torch.no_grad()
    def sample(
        self, labels: Tensor, seed: int, *, sampler: str, steps: int, batch_size: int = 256,
        progress: Callable[[int, int], None] | None = None,
    ) -> Tensor:  # fmt: skip
        """Sample one image per class in ``labels``, uint8 (n, C, H, W), by ``steps`` network steps from random noise.

        sampler: ddpm or ddim. progress: called after each network step with (steps done, total steps).
        """
        kind = {"ddpm": DDPMScheduler, "ddim": DDIMScheduler}[sampler]
        schedule = kind.from_config(self.schedule.config)
        schedule.set_timesteps(steps)
        generator = torch.Generator(self.device).manual_seed(seed)
        self.eval()
        device_times = schedule.timesteps.to(
            self.device
        )  # One copy to the GPU; a copy in each step would wait for the GPU.
        images, done, total = [], 0, -(-len(labels) // batch_size) * steps
        for y in labels.to(self.device).split(batch_size):
            x = torch.randn(len(y), *self.shape, generator=generator, device=self.device)
            for t, device_time in zip(schedule.timesteps, device_times, strict=True):
                predicted = self.unet(x, device_time, class_labels=y).sample
                x = schedule.step(predicted, t, x, generator=generator).prev_sample
                done += 1
                if progress:
                    progress(done, total)
            images.append(((x.clamp(-1, 1) + 1) * 127.5).round().to(torch.uint8))
        return torch.cat(images)
