"""Does a small network predict the labels of unseen samples, and does the model?"""

import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from adiv_monitor.audit.experiments.calls import Call, see_calls
from adiv_monitor.audit.experiments.inputs import by_name, is_input
from adiv_monitor.audit.experiments.questions import Untold, asks
from adiv_monitor.audit.training.batches import copied, size_of, tensors
from adiv_monitor.audit.training.setup import Fork, Setup, seeded
from adiv_monitor.diagnosis.record import Fact

EVERY = 4  # one of so many batches is held out
BATCHES = 8  # fewest different batches
SAMPLES = 100  # fewest samples that are held out
EXPLAINS = 0.3  # of the labels: what a small network must explain
MOST_SAMPLES, MOST_FEATURES, HIDDEN = 2048, 512, 256
PENALTIES = (1e-3, 1e-2, 1e-1, 1.0, 10.0)  # times the number of samples
LOSSES = (
    *("cross_entropy", "nll_loss", "mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss"),
    *("binary_cross_entropy", "binary_cross_entropy_with_logits", "gaussian_nll_loss"),
)
_UNKNOWN = "no known loss of one label for each sample is called with a part of the batch"


class Skill(NamedTuple):
    """How much of the labels predictions explain.

    Attributes:
        share: of the errors of a constant prediction, those that are avoided; of numbers, the
            square of the correlation.
        error: two standard errors of that share where nothing is explained.
    """

    share: float
    error: float


class _Places(NamedTuple):
    """Where the tensors of a batch belong.

    Attributes:
        inputs: numbers of those that the model is called with.
        target: number of the one that the loss is called with.
        values: whether it is compared with one number, and not with one for each class.
    """

    inputs: tuple[int, ...]
    target: int
    values: bool


@asks("behind-reference")
def ask(setup: Setup, trained: Fork) -> Iterable[Fact]:
    """The skills of a small network on unseen samples and of the trained model on the same.

    The model is not asked where the network explains something, but less than `EXPLAINS`.
    """
    found = _reference(setup)
    if isinstance(found, str):
        raise Untold(found)
    if found.skill.error < found.skill.share < EXPLAINS:
        return ()
    own = _own_skill(setup.fork_like(trained), found.batches)
    if own is None:
        raise Untold(_UNKNOWN)
    numbers = {
        "reference": found.skill.share,
        "error": found.skill.error,
        "model": own.share,
        "per class": found.per_class,
        "held out": float(found.samples),
    }
    return (Fact("", numbers),)


class _Reference(NamedTuple):
    """What a small network explains.

    Attributes:
        skill: on the held-out batches.
        batches: these.
        samples: how many they hold.
        per_class: samples of a class that it was fitted to, on average; infinite for values.
    """

    skill: Skill
    batches: tuple[Any, ...]
    samples: int
    per_class: float


def _reference(setup: Setup) -> _Reference | str:
    """The reference; or why there is none."""
    given = list({id(batch): batch for batch in setup.batches}.values())
    if len(given) < BATCHES:
        return f"{len(given)} different batches: too few to hold some out"
    places = _places(setup)
    if places is None:
        return _UNKNOWN
    rows = [list(tensors(batch)) for batch in given]
    shapes = [[rows[0][i].shape[1:] for i in places.inputs]]
    if any([row[i].shape[1:] for i in places.inputs] not in shapes for row in rows):
        return "inputs are of unlike shape from batch to batch"
    x = [torch.cat([_features(row[i]) for i in places.inputs], 1) for row in rows]
    y = [_labels(row[places.target], values=places.values) for row in rows]
    unseen = slice(EVERY - 1, None, EVERY)
    kept = [i for i in range(len(rows)) if i % EVERY != EVERY - 1]
    if sum(map(len, y[unseen])) < SAMPLES:
        return f"fewer than {SAMPLES} samples to hold out"
    trained_on = torch.cat([x[i] for i in kept])[:MOST_SAMPLES]
    labels = torch.cat([y[i] for i in kept])[:MOST_SAMPLES]
    if not bool(trained_on.isfinite().all()) or len(labels.unique()) < 2:  # type: ignore[no-untyped-call]
        return "inputs that are not finite, or labels that are all alike"
    predict = _fitted(trained_on, labels, setup.seed)
    told = skill(predict(torch.cat(x[unseen])), torch.cat(y[unseen]))
    if told is None:
        return "labels that are all alike"
    per_class = math.inf if places.values else len(labels) / len(labels.unique())  # type: ignore[no-untyped-call]
    return _Reference(told, tuple(given[unseen]), sum(map(len, y[unseen])), per_class)


def _places(setup: Setup) -> _Places | None:
    """Found by what the model and the loss are called with for the first batch."""
    fork, batch = setup.fork(), copied(setup.batches[0])
    parts, size = list(tensors(batch)), size_of(batch)
    inputs: list[int] = []
    targets: list[int] = []
    values: list[bool] = []

    def before(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        given = by_name(module, args, kwargs)
        for x in (x for n, value in given.items() if is_input(n) for x in tensors(value)):
            inputs.extend(i for i, part in enumerate(parts) if part is x and len(part) == size)

    def look(call: Call) -> None:
        pair = _pair(call, size)
        if pair is None:
            return
        target = call.argument(1, "target").flatten().double()
        found = [i for i, x in enumerate(parts) if x.numel() == len(x) == size and x.ndim
                 and torch.equal(x.flatten().double(), target)]  # fmt: skip
        targets.extend(found)
        values.extend([pair[1].is_floating_point()] * len(found))

    fork.model.register_forward_pre_hook(before, with_kwargs=True)
    with torch.no_grad():
        see_calls(fork, look, _Itself(batch))
    inputs = [i for i in dict.fromkeys(inputs) if i not in targets]
    return _Places(tuple(inputs), targets[0], values[0]) if inputs and targets else None


class _Itself:
    """Stands for a batch, of which no copy is made."""

    def __init__(self, batch: Any) -> None:
        self._batch = batch

    def __deepcopy__(self, memo: Any) -> Any:
        return self._batch


def _pair(call: Call, size: int) -> tuple[Tensor, Tensor] | None:
    """What a loss of one label for each sample compares: predicted and true classes, or values."""
    if call.name not in LOSSES:
        return None
    given, target = call.argument(0, "input"), call.argument(1, "target")
    if not isinstance(given, Tensor) or not isinstance(target, Tensor) or target.numel() != size:
        return None
    given = given.detach().cpu()
    if given.ndim == 2 and len(given) == size and not target.is_floating_point():
        return given.argmax(1), _labels(target, values=False)
    if given.numel() == size:
        return given.flatten().double(), _labels(target, values=True)
    return None


def _labels(target: Tensor, *, values: bool) -> Tensor:
    flat = target.detach().flatten().cpu()
    return flat.double() if values else flat.long()


def _features(x: Tensor) -> Tensor:
    """A sample's entries, averaged over neighbours where there are many; of words, how often."""
    x = x.detach().cpu()
    if not x.is_floating_point():
        words = x.flatten(1).long() % MOST_FEATURES
        bag = torch.zeros(len(x), MOST_FEATURES)
        return bag.scatter_add_(1, words, torch.ones(words.shape))
    x = x.float()
    if x.ndim >= 4 and x[0].numel() > MOST_FEATURES:
        x = x.flatten(3) if x.ndim > 4 else x
        side = max(1, math.isqrt(MOST_FEATURES // x.shape[1]))
        x = functional.adaptive_avg_pool2d(x, (min(side, x.shape[2]), min(side, x.shape[3])))
    flat = x.flatten(1)
    if flat.shape[1] > MOST_FEATURES:
        flat = functional.adaptive_avg_pool1d(flat[:, None], MOST_FEATURES)[:, 0]
    return flat


def _fitted(x: Tensor, labels: Tensor, seed: int) -> Any:
    """A network of one hidden layer that is drawn, whose last layer is fitted by least squares.

    Its penalty is the one that is best on a quarter of the samples.
    """
    mean, std = x.mean(0), x.std(0)
    std = torch.where(std > 0, std, torch.ones_like(std))
    with seeded(seed):
        weight = torch.randn(x.shape[1], HIDDEN) / math.sqrt(x.shape[1])
        bias = torch.randn(HIDDEN)

    def features(x: Tensor) -> Tensor:
        x = (x - mean) / std
        return torch.cat([torch.ones(len(x), 1), x, torch.tanh(x @ weight + bias)], 1).double()

    classes = None if labels.is_floating_point() else labels.unique()  # type: ignore[no-untyped-call]
    wanted = (
        (labels - labels.mean())[:, None] if classes is None
        else (labels[:, None] == classes).double()
    )  # fmt: skip
    inside = features(x)
    tried = torch.arange(len(x)) % EVERY == 0
    best = max(
        PENALTIES,
        key=lambda p: _explained(
            inside[tried] @ _solved(inside[~tried], wanted[~tried], p), labels[tried], classes
        ),
    )
    solution = _solved(inside, wanted, best)

    def predict(x: Tensor) -> Tensor:
        found = features(x) @ solution
        return found[:, 0] if classes is None else classes[found.argmax(1)]

    return predict


def _explained(found: Tensor, labels: Tensor, classes: Tensor | None) -> float:
    told = skill(found[:, 0] if classes is None else classes[found.argmax(1)], labels)
    return -math.inf if told is None else told.share


def _solved(x: Tensor, wanted: Tensor, penalty: float) -> Tensor:
    square = x.T @ x + penalty * len(x) * torch.eye(x.shape[1], dtype=x.dtype)
    return torch.linalg.solve(square, x.T @ wanted)  # type: ignore[no-any-return]


def skill(predicted: Tensor, labels: Tensor) -> Skill | None:
    """How much of the labels is explained; None: they are all alike, or there are none."""
    if len(labels) < 2 or len(labels.unique()) < 2:  # type: ignore[no-untyped-call]
        return None
    if labels.is_floating_point():
        both = torch.stack([predicted.double(), labels])
        if not bool(both.isfinite().all()):
            return Skill(0.0, 4 / len(labels))
        correlation = float(torch.corrcoef(both)[0, 1])
        return Skill(0.0 if math.isnan(correlation) else correlation**2, 4 / len(labels))
    most = float(labels.unique(return_counts=True)[1].max()) / len(labels)  # type: ignore[no-untyped-call]
    right = float((predicted == labels).double().mean())
    error = 2 * math.sqrt(most * (1 - most) / len(labels))
    return Skill((right - most) / (1 - most), error / (1 - most))


def _own_skill(fork: Fork, batches: Sequence[Any]) -> Skill | None:
    """In evaluation or in training mode, whichever explains more."""
    told = []
    for training in (False, True):
        fork.model.train(training)
        pairs = [_predictions(fork, batch) for batch in batches]
        known = [pair for pair in pairs if pair is not None]
        if len(known) == len(batches):
            predicted, labels = (torch.cat(parts) for parts in zip(*known, strict=True))
            told.append(skill(predicted, labels))
    return max((one for one in told if one is not None), key=lambda one: one.share, default=None)


def _predictions(fork: Fork, batch: Any) -> tuple[Tensor, Tensor] | None:
    size = size_of(batch)
    found: list[tuple[Tensor, Tensor]] = []

    def look(call: Call) -> None:
        if not found and (pair := _pair(call, size)) is not None:
            found.append(pair)

    with torch.no_grad():
        see_calls(fork, look, batch)
    return found[0] if found else None
