"""Figs 8 and 9 of the paper: PatchNorm in two convolutional networks, against normalisers.

    python examples/paper/convolutional.py --quick --data DIR --out OUT     minutes
    python examples/paper/convolutional.py --data DIR --out OUT             hours on a CPU

The paper does not give its networks, and trains all maps at one learning rate. Both networks have
3 × 3 filters here. "pooled" (Fig 8) ends in global average pooling and an affine map; "strided"
(Fig 9, `--network strided`) halves the image with every layer until one position is left. Adam and
pixels between 0 and 1, as in the paper; the learning rate is tuned for each map, so that the two
norm-like PatchNorms of the paper, which differ by their rates, are one.
"""

import itertools
from functools import partial
from typing import Any

import torch
from adiv_layers import AffineLikeLinear, NormLikeLinear, PatchNormConv2d
from commandline import parsed
from experiment import arguments, load
from table import plus
from torch import Tensor, nn
from training import CLASSES, Run
from tuned import Images, Trial, answer
from tuned_report import Best, Claim, Question, Verdict, above, more, result

NETWORKS = ("pooled", "strided")
PATCH_MAPS = ("patch-norm-like", "patch-affine-like")
# Learning rates that are tried first, in half decades from 1: −6 is 0.001. The first five divide
# the input of a whole image, or nothing; the others single patches.
GRIDS = {
    "none": range(-7, -4),
    "batchnorm": range(-6, -3),
    "layernorm": range(-6, -3),
    "rmsnorm": range(-6, -3),
    "l2norm": range(-6, -3),
    "patch-norm-like": range(-6, -3),
    "patch-affine-like": range(-5, -2),
}
MEASURES = (
    *("scale_mean", "scale_cv", "gradient_cosine", "update_cosine"),
    *("interference_ratio", "common_share", "update_ratio"),
)


class Over(nn.Module):
    """A sample over the length of all of its values, or over their root mean square.

    Args:
        by_size: divide by the root mean square.
        eps: added to the mean square, or to the square of the length.
    """

    def __init__(self, by_size: bool, eps: float = 1e-5) -> None:
        super().__init__()
        self.by_size = by_size
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Samples of x, (samples, channels, …)."""
        squares = x.flatten(1).square()
        square = squares.mean(1) if self.by_size else squares.sum(1)
        return x * (square + self.eps).rsqrt().view(-1, *[1] * (x.dim() - 1))


def model(network: str, map_: str, activation: str, seed: int) -> nn.Sequential:
    """A network that takes rows of inputs; networks of a seed begin with the same weights.

    Args:
        network: one of `NETWORKS`.
        map_: one of `GRIDS`; every convolution and affine map has it.
        activation: "tanh" or "leaky".
        seed: of the first weights.
    """
    torch.manual_seed(seed)
    act = nn.Tanh if activation == "tanh" else nn.LeakyReLU
    layers: list[nn.Module] = [nn.Unflatten(1, (3, 32, 32))]
    channels = (3, 16, 32, 64) if network == "pooled" else (3, 16, 32, 64, 64)
    for i, (n, m) in enumerate(itertools.pairwise(channels)):
        stride = 1 if network == "pooled" and i == 0 else 2
        layers += [*_normaliser(map_, n), _convolution(map_)(n, m, 3, stride, 1), act()]
    if network == "pooled":
        layers += [nn.AdaptiveAvgPool2d(1)]
        layers += [*_normaliser(map_, channels[-1]), nn.Flatten(), _affine(map_)(64, CLASSES)]
    else:  # 2 × 2 positions are left
        layers += [*_normaliser(map_, 64), _convolution(map_)(64, CLASSES, 2), nn.Flatten()]
    return nn.Sequential(*layers)


def _normaliser(map_: str, channels: int) -> list[nn.Module]:
    if map_ == "batchnorm":
        return [nn.BatchNorm2d(channels, affine=False)]
    if map_ == "layernorm":
        return [nn.GroupNorm(1, channels, affine=False)]
    return [Over(map_ == "rmsnorm")] if map_ in ("rmsnorm", "l2norm") else []


def _convolution(map_: str) -> Any:
    if map_ not in PATCH_MAPS:
        return nn.Conv2d
    if map_ == "patch-affine-like":
        return partial(PatchNormConv2d, form="affine-like")
    return partial(PatchNormConv2d, form="norm-like")


def _affine(map_: str) -> type[nn.Linear]:
    if map_ not in PATCH_MAPS:
        return nn.Linear
    return AffineLikeLinear if map_ == "patch-affine-like" else NormLikeLinear


def _leads(arm: str, than: str, found: Best) -> Verdict:
    difference, error = more(found, arm, than)
    return above(difference, error, 0.0), plus(difference, error, sign=True)


def _within(arm: str, than: str, points: float, found: Best) -> Verdict:
    difference, error = more(found, arm, than)
    return above(points, error, abs(difference)), plus(difference, error, sign=True)


def _not_best(found: Best) -> Verdict:
    """Whether each PatchNorm is behind the best other map."""
    others = {arm: result(runs)[0] for arm, runs in found.items() if arm not in PATCH_MAPS}
    first = max(others, key=lambda arm: others[arm])
    behind = {arm: more(found, first, arm) for arm in PATCH_MAPS}
    held = [above(*each, 0.0) for each in behind.values()]
    said = [f"{arm} {plus(*each, sign=True)}" for arm, each in behind.items()]
    return (
        False if False in held else all(held) or None,
        f"{first} less {', less '.join(said)}",
    )


def _higher(found: Best) -> Verdict:
    rates = {arm: runs[0]["learning_rate"] for arm, runs in found.items()}
    said = ", ".join(f"{arm} {rates[arm]:g}" for arm in ("none", *PATCH_MAPS))
    return min(rates[arm] for arm in PATCH_MAPS) >= 2 * rates["none"], said


def _claim(arm: str, than: str, who: str) -> Claim:
    return Claim(f"{arm} is better than {than} ({who})", partial(_leads, arm, than))


CLAIMS = {
    "pooled": (
        *(
            Claim(
                f"{arm} is within a point of layernorm (the paper)",
                partial(_within, arm, "layernorm", 1.0),
            )
            for arm in ("none", "rmsnorm")
        ),
        _claim("none", "patch-affine-like", "the paper"),
        _claim("none", "batchnorm", "the paper"),
        _claim("layernorm", "none", "we"),
    ),
    "strided": (
        *(_claim(arm, "rmsnorm", "the paper") for arm in ("batchnorm", "layernorm")),
        *(_claim(arm, "none", "the paper") for arm in ("rmsnorm", *PATCH_MAPS)),
    ),
}
QUESTIONS = {
    network: Question(
        title=f"Fig {figure}: PatchNorm and normalisers, each at its own learning rate",
        setting=f'The network "{network}", leaky ReLU, Adam.',
        unit="test accuracy, percent",
        measures=MEASURES,
        panels=(("gradient_cosine", "step"), ("interference_ratio", "step"), ("scale_cv", "layer")),
        claims=(
            Claim("PatchNorm is best nowhere (the paper)", _not_best),
            *CLAIMS[network],
            Claim("PatchNorms are best at more than twice the rate of none (we)", _higher),
        ),
    )
    for network, figure in zip(NETWORKS, (8, 9), strict=True)
}


def main() -> None:
    parser = arguments(__doc__.split("\n\n")[0], epochs=10)
    parser.add_argument("--network", choices=NETWORKS, default="pooled")
    given = parsed(parser, seeds=1, epochs=1)
    data = Images(load(given), 128, "unit", given.epochs, given.device)

    def train(trial: Trial) -> Run:
        alone = model(given.network, trial.arm, "leaky", trial.seed).to(given.device)
        optimizer = torch.optim.Adam(alone.parameters(), trial.learning_rate)
        return data.fit(alone, optimizer, trial.seed, MEASURES)

    file = given.out / f"convolutional-{given.network}.json"
    answer(QUESTIONS[given.network], file, GRIDS, data.known, train, given, parser)


if __name__ == "__main__":
    main()
