"""Convolutions by plain SGD: corrections of single patches, in the map or in the gradient alone.

    python examples/paper/patches.py --quick --data DIR --out OUT     one learning rate each
    python examples/paper/patches.py --data DIR --out OUT             about an hour

A convolution is an affine map of patches. PatchNorm divides its output at every position by the
length of the patch; "gradient-only" leaves the map as it is, and divides the gradients that its
weights receive by ‖patch‖² + 1 (eqn 20 of the paper, for every patch). The paper tests only the
first, with Adam. Here the network "pooled" of `convolutional.py` is trained by plain SGD, for which
the theory is exact, with a learning rate tuned for each.
"""

import torch
from adiv_layers import convert
from commandline import parsed
from convolutional import model
from experiment import arguments, load
from table import plus
from torch import nn
from training import Run
from tuned import Images, Trial, answer
from tuned_report import Best, Claim, Question, Verdict, above, mean, more, result

# Learning rates that are tried first, in half decades from 1: −3 is 0.03.
GRIDS = {
    "none": range(-4, 0),
    "batchnorm": range(-4, 0),
    "patch-norm-like": range(-3, 1),
    "patch-affine-like": range(-2, 2),
    "gradient-only": range(-2, 2),
}
MEASURES = (
    *("scale_mean", "scale_cv", "gradient_cosine", "update_cosine", "diagonal_cosine"),
    *("interference_ratio", "common_share", "update_ratio"),
)


def network(arm: str, seed: int) -> nn.Sequential:
    """A network of an arm; those of a seed begin with the same weights."""
    if arm != "gradient-only":
        return model("pooled", arm, "leaky", seed)
    found = model("pooled", "none", "leaky", seed)
    convert(found, "gradient-only")
    return found


def _even(found: Best) -> Verdict:
    spreads = {arm: mean(found[arm], "scale_cv") for arm in ("patch-norm-like", "none")}
    cosine = mean(found["gradient-only"], "diagonal_cosine")
    said = ", ".join(f"{arm} {value:.2g}" for arm, value in spreads.items())
    return (
        spreads["patch-norm-like"] < 0.01 and cosine > 0.99,
        f"scale_cv: {said}; diagonal_cosine, gradient-only: {cosine:.3f}",
    )


def _better(arm: str, than: str, found: Best) -> Verdict:
    difference, error = more(found, arm, than)
    return above(difference, error, 0.0), plus(difference, error, sign=True)


def _best(found: Best) -> Verdict:
    accuracies = {arm: result(mine)[0] for arm, mine in found.items()}
    said = ", ".join(f"{arm} {value:.2f}" for arm, value in accuracies.items())
    return max(accuracies, key=lambda arm: accuracies[arm]) == "batchnorm", said


QUESTION = Question(
    title="Corrections of patches under plain SGD",
    setting='The network "pooled" of Fig 8, leaky ReLU, plain SGD.',
    unit="test accuracy, percent",
    measures=MEASURES,
    panels=(("gradient_cosine", "step"), ("interference_ratio", "step"), ("scale_cv", "layer")),
    claims=(
        Claim("corrected maps have equal scales, and so has the gradient-only step", _even),
        Claim(
            "patch-affine-like is better than none by more than two standard errors (theory)",
            lambda found: _better("patch-affine-like", "none", found),
        ),
        Claim(
            "gradient-only is better than none by more than two standard errors (theory)",
            lambda found: _better("gradient-only", "none", found),
        ),
        Claim("batchnorm is better than all of them (our guess)", _best),
    ),
)


def main() -> None:
    parser = arguments(__doc__.split("\n\n")[0], epochs=5)
    given = parsed(parser, seeds=1, epochs=1)
    data = Images(load(given), 128, "centred", given.epochs, given.device)

    def train(trial: Trial) -> Run:
        alone = network(trial.arm, trial.seed).to(given.device)
        optimizer = torch.optim.SGD(alone.parameters(), trial.learning_rate)
        return data.fit(alone, optimizer, trial.seed, MEASURES)

    file = given.out / "patches.json"
    answer(QUESTION, file, GRIDS, data.known, train, given, parser)


if __name__ == "__main__":
    main()
