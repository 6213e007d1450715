"""Depth: how much of the real move of a layer's activations is due to its own step.

    python examples/paper/depth.py --quick --data DIR --out OUT     one learning rate each
    python examples/paper/depth.py --data DIR --out OUT             minutes

The theory looks at one layer, and holds its input fixed. In a real step all layers move, and the
input of a deep layer moves with those below. Networks of 2 to 20 hidden layers, 64 wide, plain and
residual, are trained on CIFAR-10 by plain SGD, for which the theory is exact, with tuned learning
rates; `Monitor(realised=True)` compares the real move with that of the layer alone.
"""

import itertools
import math
import statistics
from collections.abc import Iterable

import torch
from commandline import parsed
from experiment import arguments, load
from readings_report import layer_medians
from slopes import mean_and_error
from torch import Tensor, nn
from training import CLASSES, Run
from tuned import Images, Trial, answer
from tuned_report import Best, Claim, Question, Verdict, above

WIDTH = 64
DEPTHS = (2, 6, 20)
KINDS = ("plain", "residual")
GRIDS = {f"{kind} {depth}": range(-4, -1) for kind in KINDS for depth in DEPTHS}
MEASURES = (
    *("gradient_cosine", "update_cosine", "realised_cosine", "single_layer_share"),
    *("first_order_error", "update_ratio"),
)
DEEP = DEPTHS[-1]


class Residual(nn.Module):
    """x + W·relu(x), with initial weights smaller the more of these there are."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.linear = _linear(width, width, 1 / math.sqrt(depth))

    def forward(self, x: Tensor) -> Tensor:
        """X and what the branch adds."""
        branch: Tensor = self.linear(x.relu())
        return x + branch


def _linear(n: int, m: int, gain: float = 1.0) -> nn.Linear:
    """An affine map with He's initial weights times a gain."""
    layer = nn.Linear(n, m)
    nn.init.normal_(layer.weight, std=gain * math.sqrt(2 / n))
    nn.init.zeros_(layer.bias)
    return layer


def model(kind: str, depth: int, seed: int) -> nn.Sequential:
    """A network of so many hidden layers."""
    torch.manual_seed(seed)
    layers: list[nn.Module] = [_linear(3072, WIDTH)]
    for _ in range(depth - 1):
        if kind == "plain":
            layers += [nn.ReLU(), _linear(WIDTH, WIDTH)]
        else:
            layers += [Residual(WIDTH, depth)]
    return nn.Sequential(*layers, nn.ReLU(), _linear(WIDTH, CLASSES, 0.5))


def _by_seed(found: Best, arm: str, measure: str) -> dict[int, float]:
    """A measure of the last hidden layer by seed."""
    return {run["seed"]: layer_medians(run, measure)[-2] for run in found[arm]}


def _last_hidden(found: Best, arm: str, measure: str) -> float:
    """A measure of the last hidden layer, mean over seeds."""
    return statistics.fmean(_by_seed(found, arm, measure).values())


def _larger(more: dict[int, float], less: dict[int, float]) -> bool | None:
    """Whether a measure is larger than another, seed by seed; None if the seeds do not tell."""
    return above(*mean_and_error([more[seed] - less[seed] for seed in more if seed in less]), 0)


def _all(verdicts: Iterable[bool | None]) -> bool | None:
    """Whether all held: one that failed decides, and then one that is not shown."""
    known = list(verdicts)
    return False if False in known else None if None in known else True


def _first(found: Best) -> Verdict:
    shares = [
        layer_medians(run, "single_layer_share")[0] for runs in found.values() for run in runs
    ]
    return min(shares) > 0.999, f"least {min(shares):.4f}"


def _falls(found: Best) -> Verdict:
    said, held = [], []
    for kind in KINDS:
        shares = [_by_seed(found, f"{kind} {d}", "single_layer_share") for d in DEPTHS]
        held += [_larger(shallow, deep) for shallow, deep in itertools.pairwise(shares)]
        held.append(_larger(dict.fromkeys(shares[-1], 0.5), shares[-1]))
        said.append(f"{kind} {', '.join(f'{statistics.fmean(s.values()):.2f}' for s in shares)}")
    return _all(held), "; ".join(said)


def _residual(found: Best) -> Verdict:
    residual, plain = (
        _by_seed(found, f"{kind} {DEEP}", "single_layer_share") for kind in KINDS[::-1]
    )
    said = [", ".join(f"{share:.2f}" for share in by.values()) for by in (residual, plain)]
    return _larger(residual, plain), f"{said[0]} and {said[1]}, by seed"


def _straighter(found: Best) -> Verdict:
    measures = ("realised_cosine", "update_cosine")
    held = [_larger(*(_by_seed(found, arm, m) for m in measures)) for arm in found]
    pairs = {arm: [_last_hidden(found, arm, m) for m in measures] for arm in found}
    said = ", ".join(f"{arm}: {real:.2f} of {own:.2f}" for arm, (real, own) in pairs.items())
    return _all(held), said.replace("-", "−")


def _error(found: Best) -> Verdict:
    said, held = [], []
    for kind in KINDS:
        shallow, deep = (
            _by_seed(found, f"{kind} {depth}", "first_order_error") for depth in (DEPTHS[0], DEEP)
        )
        held.append(_larger(deep, shallow))
        means = [statistics.fmean(by.values()) for by in (shallow, deep)]
        said.append(f"{kind} {means[0]:.2f} and {means[1]:.2f}")
    return _all(held), "; ".join(said)


QUESTION = Question(
    title="Depth: the real move, and a layer's own",
    setting=f"Hidden layers {WIDTH} wide, ReLU, plain SGD; last hidden layer in what was stated.",
    unit="test accuracy, percent",
    measures=MEASURES,
    panels=(
        *(("single_layer_share", "layer"), ("realised_cosine", "layer")),
        *(("update_cosine", "layer"), ("first_order_error", "layer")),
    ),
    claims=(
        Claim("in first layers all of the real move is the layer's own (by definition)", _first),
        Claim(
            "the deeper the network, the smaller the share of the layer's own step in the real "
            f"move, below 0.5 with {DEEP} layers, plain and residual",
            _falls,
        ),
        Claim(f"with {DEEP} layers this share is larger in the residual network", _residual),
        Claim(
            "the real move goes straighter downhill than the layer's own, in every network "
            "(realised_cosine above update_cosine)",
            _straighter,
        ),
        Claim(f"moves are less linear in the step with {DEEP} layers than with 2", _error),
    ),
)


def main() -> None:
    parser = arguments(__doc__.split("\n\n")[0], epochs=1)
    parser.set_defaults(seeds=2)
    given = parsed(parser, seeds=1, epochs=1)
    data = Images(load(given), 128, "centred", given.epochs, given.device)

    def train(trial: Trial) -> Run:
        kind, depth = trial.arm.split()
        alone = model(kind, int(depth), trial.seed).to(given.device)
        optimizer = torch.optim.SGD(alone.parameters(), trial.learning_rate)
        return data.fit(alone, optimizer, trial.seed, MEASURES, realised=True)

    file = given.out / "depth.json"
    answer(QUESTION, file, GRIDS, data.known, train, given, parser)


if __name__ == "__main__":
    main()
