"""Do normalisers need the parameters that the paper takes from them?

    python examples/paper/normalisers.py --quick --data DIR --out OUT     one learning rate each
    python examples/paper/normalisers.py --data DIR --out OUT             half an hour

The paper compares BatchNorm, LayerNorm and RMSNorm without γ and β, and takes this for a reason why
RMSNorm does so badly with tanh (appendices A and B.1). Here each is in front of every affine map of
the paper's network, with tanh, Adam and its pixels, as in the paper and with parameters (RMSNorm of
torch has γ alone). Learning rates are tuned; the paper's, 0.001, is one of those that are tried.
"""

import itertools
from collections.abc import Callable

import torch
from commandline import parsed
from experiment import arguments, load
from table import plus
from torch import nn
from training import CLASSES, Run
from tuned import Images, Trial, answer
from tuned_report import Best, Claim, Question, Verdict, more

SIZES = (3072, 32, 32, CLASSES)
WITH = ", with parameters"
NORMALISERS: dict[str, Callable[[int, bool], nn.Module]] = {
    "batchnorm": lambda width, learnt: nn.BatchNorm1d(width, affine=learnt),
    "layernorm": lambda width, learnt: nn.LayerNorm(width, elementwise_affine=learnt),
    "rmsnorm": lambda width, learnt: nn.RMSNorm(width, elementwise_affine=learnt),
}
# Learning rates that are tried first, in half decades from 1: −6 is 0.001.
GRIDS = {
    "standard": range(-9, -5),
    **{f"{name}{learnt}": range(-9, -5) for name in NORMALISERS for learnt in ("", WITH)},
}
MEASURES = ("update_cosine", "harmed_fraction", "update_ratio")


def model(arm: str, seed: int) -> nn.Sequential:
    """A network of two hidden layers; those of a seed begin with the same weights."""
    torch.manual_seed(seed)
    name, _, learnt = arm.partition(", ")
    layers: list[nn.Module] = []
    for n, m in itertools.pairwise(SIZES):
        if name in NORMALISERS:
            layers.append(NORMALISERS[name](n, bool(learnt)))
        layers += [nn.Linear(n, m), nn.Tanh()]
    return nn.Sequential(*layers[:-1])


def _little(name: str) -> Claim:
    """What the parameters of a normaliser were expected to bring, in points."""

    def verdict(found: Best) -> Verdict:
        gain, error = more(found, f"{name}{WITH}", name)
        return abs(gain) <= 1 + 2 * error, f"{plus(gain, error, sign=True)} points"

    return Claim(f"parameters change {name} by 1 point at most, within two errors", verdict)


def _repaired(found: Best) -> Verdict:
    less, error = more(found, f"rmsnorm{WITH}", f"layernorm{WITH}")
    return abs(less) <= 1 + 2 * error, f"{plus(less, error, sign=True)} points"


QUESTION = Question(
    title="Normalisers with and without parameters",
    setting="The paper's network: two hidden layers, 32 wide, tanh, Adam.",
    unit="test accuracy, percent",
    measures=MEASURES,
    panels=(("update_ratio", "step"), ("harmed_fraction", "step")),
    claims=(
        *map(_little, NORMALISERS),
        Claim("the paper: with parameters, RMSNorm is as good as LayerNorm (1 point)", _repaired),
    ),
)


def main() -> None:
    parser = arguments(__doc__.split("\n\n")[0], epochs=10)
    given = parsed(parser, seeds=1, epochs=1)
    data = Images(load(given), 32, "unit", given.epochs, given.device)

    def train(trial: Trial) -> Run:
        alone = model(trial.arm, trial.seed).to(given.device)
        optimizer = torch.optim.Adam(alone.parameters(), trial.learning_rate)
        return data.fit(alone, optimizer, trial.seed, MEASURES)

    answer(QUESTION, given.out / "normalisers.json", GRIDS, data.known, train, given, parser)


if __name__ == "__main__":
    main()
