"""Reported bugs in other kinds of training: a VAE, pairs that are contrasted, two players."""

from collections.abc import Callable, Iterable

import torch
from audit.fault_benchmark import data
from audit.fault_benchmark.once_alarming import GAN
from audit.fault_benchmark.run import Case, Healthy, Run
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Adam, AdamW

LATENT = 8


class Vae(nn.Module):
    """A variational autoencoder; the targets are the inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2 * LATENT))
        self.decoder = nn.Sequential(nn.Linear(LATENT, 64), nn.ReLU(), nn.Linear(64, 64))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mean, log_variance = self.encoder(x).chunk(2, -1)
        noise = torch.randn_like(mean)
        return self.decoder(mean + noise * (0.5 * log_variance).exp()), mean, log_variance


def evidence(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Return the negative evidence lower bound of a sample, over its entries."""
    x, y = batch
    made, mean, log_variance = model(x)
    apart = 0.5 * (mean.square() + log_variance.exp() - 1 - log_variance).sum(-1)
    return functional.mse_loss(made, y) + 0.1 * apart.mean() / y.shape[1]


def _vae() -> Run:
    batches = [(x, x.clone()) for x, _ in data.digits()]
    return Run(Vae(), batches, evidence, Adam, {"lr": 3e-3})


class Contrasted(nn.Module):
    """Contrasts two noisy views of each sample with those of the others (InfoNCE)."""

    def __init__(self, temperature: float = 0.1) -> None:
        super().__init__()
        self.temperature = temperature

    def forward(self, one: Tensor, other: Tensor) -> Tensor:
        one, other = functional.normalize(one, dim=-1), functional.normalize(other, dim=-1)
        alike = one @ other.T / self.temperature
        return functional.cross_entropy(alike, torch.arange(len(one)))


def contrast(temperature: float) -> Callable[[nn.Module, tuple[Tensor, Tensor]], Tensor]:
    of = Contrasted(temperature)

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        one, other = batch
        return of(model(one), model(other))

    return loss


def _pairs() -> Run:
    views = [(x + torch.randn_like(x), x + torch.randn_like(x)) for x, _ in data.digits()]
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 32))
    return Run(model, views, contrast(0.1), AdamW, {"lr": 3e-3})


class Listed(nn.Module):
    """Holds layers in a plain list."""

    def __init__(self, layers: Iterable[nn.Module]) -> None:
        super().__init__()
        self.layers = list(layers)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def listed(name: str) -> Callable[[Run], None]:
    def plant(run: Run) -> None:
        setattr(run.model, name, Listed(getattr(run.model, name)))

    return plant


def squashed(run: Run) -> None:
    """End the decoder in a sigmoid; the targets are standardised."""
    run.model.decoder.append(nn.Sigmoid())


def lukewarm(run: Run) -> None:
    """Compare cosines without a temperature."""
    run.loss = contrast(1.0)


VAE = Healthy("vae-adam", "VAE", _vae)
PAIRS = Healthy("pairs-adamw", "contrastive", _pairs)

SET_BY = [
    Case("vae-adam: decoder in a list", VAE, ("hidden-parameters",), listed("decoder")),
    Case("pairs-adamw: no temperature", PAIRS, ("bounded-logits",), lukewarm),
]
HELD_OUT = [
    Case("vae-adam: sigmoid on the outputs", VAE, ("targets-out-of-range",), squashed),
    Case("gan-adam: generator in a list", GAN, ("hidden-parameters",), listed("generator")),
]
