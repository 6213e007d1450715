"""What optimizers do to the move of activations: SGD, momentum, Adam, AdamW, Muon.

    python examples/paper/optimizers.py --quick --data DIR --out OUT     one learning rate each
    python examples/paper/optimizers.py --data DIR --out OUT             minutes

The theory is about plain gradient descent. Other optimizers take another step, so activations move
in another direction. Networks of two hidden layers, 64 wide, without biases (Muon takes matrices
alone), classify CIFAR-10; the learning rate of every optimizer is tuned. SGD, Adam and Muon also
train affine-like layers. Muon needs torch 2.9.
"""

import itertools
from collections.abc import Callable, Iterable

import torch
from adiv_layers import AffineLikeLinear
from commandline import parsed
from experiment import arguments, load
from scipy import stats
from table import plus
from torch import nn
from training import CLASSES, Run
from tuned import Images, Trial, answer
from tuned_report import Best, Claim, Question, Verdict, mean, more, result

SIZES = (3072, 64, 64, CLASSES)
Parameters = Iterable[nn.Parameter]
OPTIMIZERS: dict[str, Callable[[Parameters, float], torch.optim.Optimizer]] = {
    "sgd": lambda parameters, lr: torch.optim.SGD(parameters, lr),
    "momentum": lambda parameters, lr: torch.optim.SGD(parameters, lr, momentum=0.9),
    "adam": lambda parameters, lr: torch.optim.Adam(parameters, lr),
    "adamw": lambda parameters, lr: torch.optim.AdamW(parameters, lr, weight_decay=0.1),
    "muon": lambda parameters, lr: torch.optim.Muon(parameters, lr, weight_decay=0.0),
}
# Learning rates that are tried first, in half decades from 1: −3 is 0.03.
GRIDS = {
    "sgd": range(-5, -1),
    "momentum": range(-7, -3),
    "adam": range(-8, -4),
    "adamw": range(-8, -4),
    "muon": range(-6, -2),
    # Affine-like layers: outputs are divided by the norms of inputs, so steps may be longer.
    "sgd, affine-like": range(-2, 2),
    "adam, affine-like": range(-7, -3),
    "muon, affine-like": range(-5, -1),
}
PLAIN = tuple(OPTIMIZERS)
MEASURES = (
    *("gradient_cosine", "update_cosine", "parameter_cosine", "harmed_fraction"),
    *("interference_ratio", "update_ratio", "realised_cosine", "first_order_error"),
)


def model(seed: int, linear: type[nn.Linear] = nn.Linear) -> nn.Sequential:
    """A network that begins alike for every optimizer."""
    torch.manual_seed(seed)
    layers: list[nn.Module] = []
    for n, m in itertools.pairwise(SIZES):
        layers += [linear(n, m, bias=False), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def _alike(found: Best) -> Verdict:
    gradient, update = (mean(found["sgd"], m) for m in ("gradient_cosine", "update_cosine"))
    return abs(update - gradient) < 0.01 * abs(gradient), f"{update:.3f} and {gradient:.3f}"


def _turned(found: Best) -> Verdict:
    pairs = {
        arm: (mean(found[arm], "update_cosine"), mean(found[arm], "gradient_cosine"))
        for arm in PLAIN
        if arm != "sgd"
    }
    said = ", ".join(f"{arm} {u:.3f} of {g:.3f}" for arm, (u, g) in pairs.items())
    return all(update < gradient for update, gradient in pairs.values()), said


def _muon(found: Best) -> Verdict:
    muon, sgd = (mean(found[arm], "update_cosine") for arm in ("muon", "sgd"))
    gain, error = more(found, "muon", "sgd")
    said = f"update_cosine {muon:.3f} and {sgd:.3f}; {plus(gain, error, sign=True)} points"
    return muon < sgd and gain > 0, said


def _follows(found: Best) -> Verdict:
    cosines = [mean(found[arm], "update_cosine") for arm in PLAIN]
    accuracies = [result(found[arm])[0] for arm in PLAIN]
    found_r = stats.spearmanr(cosines, accuracies)
    r, p = float(found_r.statistic), float(found_r.pvalue)
    said = f"rank correlation {r:+.2f} over {len(PLAIN)} optimizers, p = {p:.1g}".replace("-", "−")
    return None if p > 0.05 else r < 0, said


def _harmed(found: Best) -> Verdict:
    momentum, sgd = (mean(found[arm], "harmed_fraction") for arm in ("momentum", "sgd"))
    return momentum > sgd, f"{momentum:.3f} and {sgd:.3f}"


def _gains(optimizer: str, least: float, most: float) -> Claim:
    """What affine-like layers were expected to add to an optimizer, in points."""

    def verdict(found: Best) -> Verdict:
        if f"{optimizer}, affine-like" not in found:
            return None, "not run"
        gain, error = more(found, f"{optimizer}, affine-like", optimizer)
        within = least - 2 * error <= gain <= most + 2 * error
        return within, f"{plus(gain, error, sign=True)} points"

    named = {"sgd": "plain SGD", "adam": "Adam", "muon": "Muon"}[optimizer]
    bounds = f"{least:g} to {most:g}".replace("-", "−")
    return Claim(f"affine-like layers add {bounds} points to {named}, within two errors", verdict)


QUESTION = Question(
    title="What optimizers do to the move of activations",
    setting="Two hidden layers, 64 wide, ReLU, no biases.",
    unit="test accuracy, percent",
    measures=MEASURES,
    panels=(("update_cosine", "step"), ("harmed_fraction", "step"), ("update_ratio", "layer")),
    claims=(
        Claim("plain SGD's step is the gradient's: update_cosine is gradient_cosine", _alike),
        Claim(
            "every other optimizer turns activations away from downhill: update_cosine is below "
            "gradient_cosine",
            _turned,
        ),
        Claim("momentum moves more rows uphill than plain SGD (harmed_fraction)", _harmed),
        Claim("Muon's activations go less straight downhill than SGD's, and it is better", _muon),
        Claim(
            "over optimizers, accuracy does not rise with update_cosine (against the theory's "
            "hope; measured at each one's best learning rate)",
            _follows,
        ),
        _gains("sgd", 0, 1.5),
        _gains("adam", -1, 1),
        _gains("muon", -1, 1),
    ),
)


def main() -> None:
    parser = arguments(__doc__.split("\n\n")[0], epochs=6)
    given = parsed(parser, seeds=1, epochs=1)
    data = Images(load(given), 128, "centred", given.epochs, given.device)

    def train(trial: Trial) -> Run:
        named, _, corrected = trial.arm.partition(", ")
        alone = model(trial.seed, AffineLikeLinear if corrected else nn.Linear).to(given.device)
        optimizer = OPTIMIZERS[named](alone.parameters(), trial.learning_rate)
        return data.fit(alone, optimizer, trial.seed, MEASURES, realised=True)

    file = given.out / "optimizers.json"
    answer(QUESTION, file, GRIDS, data.known, train, given, parser)


if __name__ == "__main__":
    main()
