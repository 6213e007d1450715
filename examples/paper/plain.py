"""The ensemble's networks as anyone would write them: one model, one optimizer, one loop each.

What the stacked ones are compared with: for equality in the tests, for speed by

    python examples/paper/plain.py --data DIR
"""

import argparse
import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, cast

import cifar
import torch
from adiv_layers import AffineLikeLinear, GradientOnlyLinear, NormLikeLinear
from adiv_layers.gradient_only import LinearForm
from commandline import count
from ensemble import NONLINEAR, SLOPES, Network
from graph import is_settled
from methods import METHODS, Columns
from table1 import ARMS
from torch import Tensor, nn
from training import Course, Setting


class Centred(nn.Module):
    """x less a running mean: of all batches at first, later one that forgets."""

    mean: Tensor

    def __init__(self, width: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(width))
        self.batches = 0

    def forward(self, x: Tensor) -> Tensor:
        """Rows less the mean."""
        if self.training:
            self.batches += 1
            share = max(1 / self.batches, Columns.FORGETTING)
            self.mean += share * (x.detach().mean(0) - self.mean)
        return x - self.mean


class Over(nn.Module):
    """x over a constant."""

    def __init__(self, divisor: float) -> None:
        super().__init__()
        self.divisor = divisor

    def forward(self, x: Tensor) -> Tensor:
        """Rows over the constant."""
        return x / self.divisor


class IsotropicTanh(nn.Module):
    """tanh(‖x‖)·x/‖x‖ of rows."""

    def forward(self, x: Tensor) -> Tensor:
        """Rows of the same directions, shorter than 1."""
        length: Tensor = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        return length.tanh() * x / length


class RateByLayer(nn.Linear):
    """An affine map whose learning rate is over the mean of ‖x‖² + 1 of each batch."""

    def forward(self, input: Tensor) -> Tensor:
        """W·x + b; the gradients of W and b are divided."""
        length = (input.detach().square().sum(-1) + 1).mean()
        weight, bias = (_Over.apply(each, length) for each in (self.weight, self.bias))
        return nn.functional.linear(input, weight, bias)


class _Over(torch.autograd.Function):
    """The identity, whose gradient is divided."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, divisor: Tensor) -> Tensor:
        ctx.divisor = divisor
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0] / ctx.divisor, None


class Residual(nn.Module):
    """x and what a branch makes of it."""

    def __init__(self, branch: nn.Module) -> None:
        super().__init__()
        self.branch = branch

    def forward(self, x: Tensor) -> Tensor:
        """The sum."""
        made: Tensor = self.branch(x)
        return x + made


def model(
    network: Network, sizes: Sequence[int], typical: float, residual: bool = False
) -> nn.Sequential:
    """One network, with the weights it has at first in an ensemble."""
    torch.manual_seed(network.seed)
    parts: list[nn.Module] = []
    for n, m in itertools.pairwise(sizes):
        layers = [*_normaliser(network.method, n), _linear(network.method, n, m)]
        if network.method == "constant-scale" and not parts:
            layers.insert(0, Over(typical))
        hidden = len(parts) < len(sizes) - 2
        if hidden:
            tanh = network.activation == "tanh"
            layers.append(nn.Tanh() if tanh else nn.LeakyReLU(SLOPES[network.activation]))
        part = nn.Sequential(*layers)
        parts.append(Residual(part) if residual and hidden and parts else part)
    return nn.Sequential(*parts)


def optimizer(network: Network, model: nn.Module, name: str = "adam") -> torch.optim.Optimizer:
    """The network's own Adam or SGD."""
    rate = network.learning_rate * METHODS[network.method].rate
    if name == "sgd":
        return torch.optim.SGD(model.parameters(), lr=rate)
    return torch.optim.Adam(model.parameters(), lr=rate)


def _normaliser(method: str, width: int) -> list[nn.Module]:
    if method == "batchnorm":
        return [nn.BatchNorm1d(width, affine=False)]
    if method == "layernorm":
        return [nn.LayerNorm(width, elementwise_affine=False)]
    if method == "rmsnorm":
        return [nn.RMSNorm(width, METHODS[method].constant, elementwise_affine=False)]
    if METHODS[method].isotropic:
        return [IsotropicTanh()]
    return [Centred(width)] if METHODS[method].columns == "centred" else []


def _linear(method: str, inputs: int, outputs: int) -> nn.Linear:
    if method.startswith("norm-like"):
        return NormLikeLinear(inputs, outputs)
    if METHODS[method].scaled_bias:
        return AffineLikeLinear(inputs, outputs)
    if method.startswith("gradient-"):
        form = cast(LinearForm, METHODS[method].gradient)
        return GradientOnlyLinear(inputs, outputs, form=form)
    return RateByLayer(inputs, outputs) if method == "rate-by-layer" else nn.Linear(inputs, outputs)


def compare(
    data: cifar.Data, batch_size: int, steps: int, device: str, seeds: int
) -> tuple[float, float, float]:
    """Networks × steps per second, medians of five rounds.

    Returns:
        Of a plain loop, of the ensemble, and of what the ensemble can't do without: the two
        products of the first map, and Adam's pass over its weights.
    """
    networks = tuple(
        itertools.starmap(Network, itertools.product(ARMS, NONLINEAR, range(seeds), [1e-3]))
    )
    course = Course(Setting(batch_size, 32, 2, "unit", networks), data, device)
    sizes = course.ensemble.sizes
    models = [model(network, sizes, 29.6).to(device) for network in networks[::seeds]]
    optimizers = [optimizer(n, m) for n, m in zip(networks[::seeds], models, strict=True)]
    order = torch.randperm(len(data.train))[: steps * batch_size].to(device)
    rows = torch.split(order, batch_size)
    images, labels = course.train

    def plainly() -> None:
        for each, adam in zip(models, optimizers, strict=True):
            for chosen in rows:
                adam.zero_grad()
                x, y = course.pixels(images[chosen]), labels[chosen]
                torch.autograd.backward(nn.functional.cross_entropy(each(x), y))
                adam.step()

    def stacked() -> None:
        for chosen in rows:
            course.step(chosen.expand(len(course.ensemble.seeds), -1))

    def least() -> None:
        for chosen in rows:
            seen = [course.pixels(images[chosen])] * len(course.ensemble.views)
            z = course.ensemble.first_products(seen)
            course.ensemble.first_update(z, seen)

    def speed(run: Callable[[], None], count: int) -> float:
        seconds = []
        for _ in range(6):
            started = now(device)
            run()
            seconds.append(now(device) - started)
        del seconds[0]  # in which a GPU's libraries and graph are made ready
        return count * len(rows) / statistics.median(seconds)

    while not is_settled(course.ensemble):
        stacked()
    loop = speed(plainly, len(models))
    return loop, speed(stacked, len(networks)), speed(least, len(networks))


def now(device: str) -> float:
    """Seconds of the processor, or of the clock once a GPU has done all its work."""
    if device == "cpu":
        return time.process_time()
    torch.cuda.synchronize(device)
    return time.perf_counter()


def main() -> None:
    parser = argparse.ArgumentParser(description="Networks × steps per second of processor time.")
    parser.add_argument("--data", required=True)
    parser.add_argument("--batch-sizes", nargs="+", type=count, default=[8, 32, 128])
    parser.add_argument("--seeds", type=count, default=3, help="16 networks each")
    parser.add_argument("--steps", type=count, default=50)
    parser.add_argument("--device", default="cpu")
    given = parser.parse_args()
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    data = cifar.load(given.data)
    for batch_size in given.batch_sizes:
        plain, stacked, least = compare(data, batch_size, given.steps, given.device, given.seeds)
        print(
            f"batch size {batch_size}: plain {plain:.0f}, stacked {stacked:.0f} "
            f"({stacked / plain:.1f} ×), products and Adam of the first map alone {least:.0f} "
            f"({least / plain:.1f} ×)"
        )


if __name__ == "__main__":
    main()
