"""Bugs of the kind that people report: wiring, loss and data. Each with its fixed twin.

Rules were made with the bugs in `SET_BY`. Those in `HELD_OUT` are other networks and other ways to
make the same mistakes; they were not used while rules were written.
"""

import warnings
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from audit.fault_benchmark import data, healthy, networks, reported_inputs, reported_weights
from audit.fault_benchmark.faulty.wiring import ending, with_loss
from audit.fault_benchmark.reported_kinds import Listed
from audit.fault_benchmark.run import Case, Healthy, Run
from computes import Computes
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import SGD, AdamW


def listed(run: Run) -> None:
    run.model.body = Listed(run.model.body)


def mixed(run: Run) -> None:
    """Mix features by a tensor with a gradient that is no parameter."""
    width = run.model.head.in_features
    by_key = {"mix": (0.1 * torch.randn(width, width)).requires_grad_()}
    mixes = Computes(lambda m, x: x @ m.by_key["mix"], by_key=by_key)
    run.model.body = nn.Sequential(run.model.body, mixes)


def body_still(model: nn.Module) -> Iterable[Any]:
    """Return two groups; the body's rate was computed by integer division."""
    return [
        {"params": model.body.parameters(), "lr": 1 // 1000},
        {"params": model.head.parameters()},
    ]


def still(run: Run) -> None:
    run.held = body_still


def first_still(run: Run) -> None:
    first = next(iter(run.model.body.children()))
    place = list(run.model.body.children()).index(first)

    def held(model: nn.Module) -> Iterable[Any]:
        own = list(model.body[place].parameters())
        others = [p for p in model.parameters() if all(p is not q for q in own)]
        return [{"params": own, "lr": 0.0}, {"params": others}]

    run.held = held


def in_bfloat16(run: Run) -> None:
    run.model.bfloat16()
    run.batches = [(x.bfloat16() if x.is_floating_point() else x, y) for x, y in run.batches]
    loss = run.loss

    def widened(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return loss(lambda x: model(x).float(), batch)  # type: ignore[arg-type]

    run.loss = widened


def slowly_in_bfloat16(by: float) -> Callable[[Run], None]:
    def plant(run: Run) -> None:
        in_bfloat16(run)
        slower(run, by)

    return plant


def in_evaluation(run: Run) -> None:
    """Set the body to evaluation mode, as if it were pretrained."""
    run.model.body.eval()


def kept(rate: float) -> Callable[[Run], None]:
    """Use the share to keep as the share to drop."""

    def plant(run: Run) -> None:
        for module in run.model.modules():
            if isinstance(module, nn.Dropout):
                module.p = rate

    return plant


def few(samples: int) -> Callable[[Run], None]:
    def plant(run: Run) -> None:
        run.batches = [(x[:samples], y[:samples]) for x, y in run.batches]

    return plant


def slower(run: Run, by: float) -> None:
    run.settings["lr"] /= by


def _normed() -> Run:
    """An MLP with batch normalisation."""
    body = [
        *(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU()),
        *(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU()),
    ]
    model = networks.Net(nn.Sequential(*body), nn.Linear(64, 10))
    return healthy.classify(model, data.digits(), SGD, 0.1)


def _deep_normed() -> Run:
    """Eight tanh layers, each with batch normalisation, whose weights are small."""
    body = [m for _ in range(8) for m in (nn.Linear(64, 64), nn.BatchNorm1d(64), nn.Tanh())]
    model = networks.Net(nn.Sequential(*body), nn.Linear(64, 10))
    networks.initialise(model, 0.3)
    return healthy.classify(model, data.digits(), SGD, 0.1)


def _bfloat16() -> Run:
    """The weights are of float32, and AdamW's usual rate for fine-tuning does well enough."""
    return healthy.classify(networks.mlp([64, 64, 64, 10]), data.digits(), AdamW, 1e-3)


def _dropped() -> Run:
    return healthy.classify(
        networks.mlp([64, 128, 128, 10], dropout=0.1), data.digits(), AdamW, 3e-3
    )


def _normed_regression() -> Run:
    body = nn.Sequential(nn.Linear(16, 48), nn.BatchNorm1d(48), nn.Tanh())
    model = networks.Net(body, nn.Linear(48, 3))
    return Run(model, data.taught(), healthy.squared_error, SGD, {"lr": 0.1})


NORMED_REGRESSION = Healthy("normed-regression-sgd", "regression", _normed_regression)
NORMED = Healthy("normed-sgd", "MLP", _normed)
DEEP_NORMED = Healthy("deep-normed-sgd", "MLP", _deep_normed)
ADAMW = Healthy("mlp-adamw", "MLP", _bfloat16)
DROPPED = Healthy("dropped-adamw", "MLP", _dropped)


# Bugs that change what the loss, its batches or its lowest value mean: judged by the error.
BY_ERROR = frozenset(
    {
        *("broadcast-loss", "no-log", "softmax-of-one", "softmax-over-samples", "target-is-input"),
        *("future-leak", "same-batch", "unshuffled", "unbounded-loss", "labels-unrelated"),
        "constant-data",
    }
)


def _case(twin: Healthy, what: str, plant: Callable[[Run], None], *expected: str) -> Case:
    because = "the first is the cause, the others follow from it" * (len(expected) > 1)
    judged_by = "error" if expected[0] in BY_ERROR else "loss"
    return Case(f"{twin.name}: {what}", twin, expected, plant, because, judged_by=judged_by)


def _one_value() -> Run:
    """One value of 16 features, as (samples,)."""
    batches = [(x, y[:, 0]) for x, y in data.taught()]
    return Run(networks.mlp([16, 48, 48, 1]), batches, squeezed, SGD, {"lr": 0.1})


def squeezed(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return functional.mse_loss(model(batch[0])[:, 0], batch[1])


def _two_circles() -> Run:
    batches = [(x, y.float()[:, None]) for x, y in data.circles()]
    model = networks.mlp([2, 32, 32, 1])
    return Run(model, batches, one_logit, AdamW, {"lr": 1e-2})


def one_logit(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return functional.binary_cross_entropy_with_logits(model(batch[0]), batch[1])


ONE_VALUE = Healthy("one-value-sgd", "regression", _one_value)
TWO_CIRCLES = Healthy("two-circles-adamw", "MLP", _two_circles)


def broadcasting(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Return the squared error of (B, 1) and (B,)."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # as if nobody read what torch says
        return functional.mse_loss(model(batch[0]), batch[1])


def subtracting(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Return the mean absolute difference of (B,) and (B, 1)."""
    x, y = batch
    return (model(x).flatten() - y[:, None]).abs().mean()


def nll_of_shares(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return functional.nll_loss(model(batch[0]).softmax(-1), batch[1])


def kl_of_shares(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    x, y = batch
    sought = functional.one_hot(y, 10).float()
    return functional.kl_div(functional.softmax(model(x), dim=1), sought, reduction="batchmean")


def softmax_of_one(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return functional.binary_cross_entropy(torch.softmax(model(batch[0]), 1), batch[1])


def over_samples(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return functional.cross_entropy(model(batch[0]).softmax(0), batch[1])


def nll_over_samples(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return functional.nll_loss(functional.log_softmax(model(batch[0]), dim=0), batch[1])


def one_share(run: Run) -> None:
    """A softmax behind the one unit, in the model; the loss is the squared error."""
    run.model.head = nn.Sequential(run.model.head, nn.Softmax(dim=-1))
    run.loss = healthy.squared_error


def not_shifted(run: Run) -> None:
    run.batches = [(x, x.clone()) for x, _ in run.batches]


def looking_ahead(run: Run) -> None:
    for module in run.model.modules():
        if isinstance(module, networks.Block):
            module.causal = False


def both_ways(run: Run) -> None:
    recurrent = run.model.body
    width = recurrent.lstm.hidden_size
    recurrent.lstm = nn.LSTM(width, width // 2, batch_first=True, bidirectional=True)


def pixels(m: nn.Module, x: Tensor) -> Tensor:
    """Take images (samples, height, width, channels), which convolutions want otherwise."""
    b, h, w, c = x.shape
    return x.reshape(b, c, h, w) if m.scrambled else x.permute(0, 3, 1, 2)


def heads(m: nn.Module, x: Tensor) -> Tensor:
    """Attend by two heads, which a view makes of the width, or rather of places and width."""
    b, t, width = x.shape
    if m.scrambled:
        q, k, v = (y.reshape(b, 2, t, width // 2) for y in m.qkv(x).chunk(3, -1))
    else:
        parts = [y.reshape(b, t, 2, width // 2) for y in m.qkv(x).chunk(3, -1)]
        q, k, v = (y.transpose(1, 2) for y in parts)
    y = functional.scaled_dot_product_attention(q, k, v)
    y = y.reshape(b, t, width) if m.scrambled else y.transpose(1, 2).reshape(b, t, width)
    return x + m.project(y)


class Cell(nn.Module):
    """A hand-written recurrence, which sums its states over places."""

    def __init__(self, cut: bool = False) -> None:
        super().__init__()
        self.cut, self.cell = cut, nn.GRUCell(1, 32)

    def forward(self, x: Tensor) -> Tensor:
        h = x.new_zeros(len(x), 32)
        for step in x.unbind(1):
            h = self.cell(step[:, None], h.detach() if self.cut else h)
        return h


def branch(m: nn.Module, x: Tensor) -> Tensor:
    """Compute two layers beside a weak shortcut."""
    return 0.1 * x + m.second(m.first(x.data if m.cut else x).relu())


def _rows() -> Run:
    """A GRU's last output; an image's rows are its steps."""
    last = lambda m, x: m.gru(x.reshape(-1, 8, 8))[0][:, -1]  # noqa: E731
    body = Computes(last, gru=nn.GRU(8, 32, batch_first=True))
    return healthy.classify(networks.Net(body, nn.Linear(32, 10)), data.images(), AdamW, 1e-2)


def _pixels() -> Run:
    """Two channels: an image and its mirror image."""
    batches = [(torch.stack([x[:, 0], x[:, 0].flip(1)], -1), y) for x, y in data.images()]
    body = nn.Sequential(
        Computes(pixels, scrambled=False),
        *(nn.Conv2d(2, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()),
    )
    return healthy.classify(networks.Net(body, nn.Linear(256, 10)), batches, AdamW, 3e-3)


def _heads() -> Run:
    embed = (networks.Patches(), nn.Linear(16, 32), networks.Positions(4, 32))
    layers = {"qkv": nn.Linear(32, 96), "project": nn.Linear(32, 32)}
    attends = Computes(heads, scrambled=False, **layers)
    body = nn.Sequential(*embed, attends, nn.LayerNorm(32), nn.Flatten())
    return healthy.classify(networks.Net(body, nn.Linear(128, 10)), data.images(), AdamW, 3e-3)


def _remembered() -> Run:
    """The sign of the first half's sum."""
    x = torch.randn(2048, 8)
    batches = data.minibatches(x, (x[:, :4].sum(1) > 0).long(), 64)
    return healthy.classify(networks.Net(Cell(), nn.Linear(32, 2)), batches, AdamW, 3e-2)


def _branch() -> Run:
    first, *layers = nn.Linear(64, 48), nn.Linear(48, 48), nn.Linear(48, 48)
    beside = Computes(branch, cut=False, first=layers[0], second=layers[1])
    body = nn.Sequential(first, nn.ReLU(), beside, nn.ReLU())
    return healthy.classify(networks.Net(body, nn.Linear(48, 10)), data.digits(), SGD, 0.5)


def _centred() -> Run:
    """A fault subtracts the mean over the batch instead of that over the features."""
    centred = Computes(lambda m, x: x - x.mean(m.axis, keepdim=True), axis=1)
    body = nn.Sequential(nn.Linear(64, 48), centred, nn.ReLU())
    return healthy.classify(networks.Net(body, nn.Linear(48, 10)), data.digits(), SGD, 0.3)


ROWS = Healthy("rows-gru-adamw", "GRU", _rows)
PIXELS = Healthy("pixels-adamw", "CNN", _pixels)
HEADS = Healthy("heads-adamw", "transformer", _heads)
REMEMBERED = Healthy("remembered-cell-adamw", "GRU", _remembered)
BRANCH = Healthy("branch-sgd", "MLP", _branch)
CENTRED = Healthy("centred-sgd", "MLP", _centred)


def attributes(**values: object) -> Callable[[Run], None]:
    """Sets these of all modules that have them."""

    def plant(run: Run) -> None:
        for module in run.model.modules():
            for name, value in values.items():
                if name in vars(module):
                    setattr(module, name, value)

    return plant


class Cosines(nn.Module):
    """Cosines of features and one weight for each class, times a temperature."""

    def __init__(self, width: int, classes: int, temperature: float = 20.0) -> None:
        super().__init__()
        self.weight, self.temperature = nn.Parameter(torch.randn(classes, width)), temperature

    def forward(self, x: Tensor) -> Tensor:
        cosines = functional.normalize(x, dim=-1) @ functional.normalize(self.weight, dim=-1).T
        return self.temperature * cosines


def _cosines() -> Run:
    body = networks.mlp([64, 64, 64, 10]).body
    return healthy.classify(networks.Net(body, Cosines(64, 10)), data.digits(), AdamW, 3e-3)


def _cosines_of_words() -> Run:
    model = networks.gpt()
    model.head = Cosines(32, data.WORDS)
    return healthy.classify(model, data.text(), AdamW, 1e-2)


COSINES = Healthy("cosines-adamw", "MLP", _cosines)
COSINES_OF_WORDS = Healthy("gpt-cosines-adamw", "transformer", _cosines_of_words)


def one_batch(count: int) -> Callable[[Run], None]:
    """Repeat the first batches, as with an index that never increases."""

    def plant(run: Run) -> None:
        run.batches = [
            tuple(x.clone() for x in run.batches[i % count])  # type: ignore[misc]
            for i in range(len(run.batches))
        ]

    return plant


def sorted_by_label(run: Run) -> None:
    """Sort the data by class, as if shuffle=True were missing."""
    size, count = len(run.batches[0][1]), len(run.batches)
    x, y = (torch.cat(parts) for parts in zip(*run.batches, strict=True))
    order = y.argsort(stable=True)
    # In an epoch, of a ninth of the steps, all labels come.
    epochs = [order[i::9] for i in range(9)]
    rows = torch.cat(epochs).split(size)[:count]
    run.batches = [(x[some], y[some]) for some in rows if len(some) == size]
    run.batches += run.batches[: count - len(run.batches)]


def negated(run: Run) -> None:
    """A minus that a maximum wants."""
    loss = run.loss
    run.loss = lambda model, batch: -loss(model, batch)


def labels_apart(run: Run) -> None:
    """Inputs and labels are shuffled each by itself."""
    x, y = zip(*run.batches, strict=True)
    labels = torch.cat(y)
    mixed = labels[torch.randperm(len(labels))].split([len(part) for part in y])
    run.batches = list(zip(x, mixed, strict=True))


def whole_labels(run: Run) -> None:
    """Labels are scaled by an integer division."""
    run.batches = [(x, y // 10) for x, y in run.batches]


def whole_inputs(run: Run) -> None:
    """Inputs are scaled by an integer division."""
    run.batches = [(x * 0.0, y) for x, y in run.batches]


def relu_unassigned(m: nn.Module, x: Tensor) -> Tensor:
    """Compute a layer and its activation function, whose result is thrown away."""
    z: Tensor = m.layer(x)
    m.relu(z)
    return z


def without_activations(run: Run) -> None:
    run.model.body = nn.Sequential(
        *(nn.Identity() if isinstance(m, nn.ReLU) else m for m in run.model.body)
    )


def unassigned(run: Run) -> None:
    without_activations(run)
    run.model.body = nn.Sequential(
        *(
            Computes(relu_unassigned, layer=m, relu=nn.ReLU()) if isinstance(m, nn.Conv2d) else m
            for m in run.model.body
        )
    )


def made_anew(run: Run) -> None:
    """A layer of the width is made in each forward pass."""
    anew = Computes(lambda m, x: nn.Linear(x.shape[1], x.shape[1])(x).relu())
    run.model.head = nn.Sequential(anew, run.model.head)


def positions_of_samples(run: Run) -> None:
    """Add a vector for each sample of the batch, instead of one for each place."""
    for i, module in enumerate(run.model.body):
        if isinstance(module, networks.Positions):
            table = nn.Embedding(256, module.positions.shape[-1])
            run.model.body[i] = Computes(
                lambda m, x: x + m.table.weight[: len(x), None], table=table
            )


SET_BY = [
    _case(healthy.MLP_SGD, "labels divided to 0", whole_labels, "constant-data"),
    _case(healthy.REGRESSION, "no activation functions", without_activations, "no-activation"),
    _case(healthy.MLP_ADAM, "a layer made in forward()", made_anew, "hidden-parameters"),
    _case(healthy.MLP_SGD, "layers in a list", listed, "hidden-parameters"),
    _case(healthy.MLP_ADAM, "a group of rate 0", still, "rate-zero"),
    _case(ADAMW, "bfloat16 weights, a tenth of the rate", slowly_in_bfloat16(10.0), "rounded-away"),
    _case(DEEP_NORMED, "body in evaluation mode", in_evaluation, "left-in-eval"),
    _case(NORMED, "batches of 3", few(3), "batch-norm-starved"),
    _case(DROPPED, "keep for drop", kept(0.9), "dropout-too-high"),
    _case(ONE_VALUE, "(B, 1) against (B,)", with_loss(broadcasting), "broadcast-loss"),
    _case(healthy.MLP_SGD, "nll_loss of a softmax", with_loss(nll_of_shares), "no-log"),
    _case(TWO_CIRCLES, "softmax over one unit", with_loss(softmax_of_one), "softmax-of-one"),
    _case(healthy.MLP_ADAM, "softmax(dim=0)", with_loss(over_samples), "softmax-over-samples"),
    _case(healthy.REGRESSION, "ReLU on the outputs", ending(nn.ReLU), "targets-out-of-range"),
    _case(healthy.GPT, "labels not shifted", not_shifted, "target-is-input"),
    _case(healthy.GPT, "no causal mask", looking_ahead, "future-leak"),
    _case(ROWS, "no batch_first", attributes(batch_first=False), "samples-mixed"),
    _case(PIXELS, "view for permute", attributes(scrambled=True), "reshape-scrambles"),
    _case(REMEMBERED, "state detached", attributes(cut=True), "gradient-cut"),
    _case(healthy.MLP_MOMENTUM, "one batch again and again", one_batch(1), "same-batch"),
    _case(healthy.MLP_SGD, "sorted by label", sorted_by_label, "unshuffled"),
    _case(COSINES, "no temperature", attributes(temperature=1.0), "bounded-logits"),
    _case(ADAMW, "rate 1e-7", partial(slower, by=1e4), "rate-too-low"),
    _case(healthy.MLP_SGD, "the loss with a minus", negated, "unbounded-loss"),
    _case(healthy.MLP_ADAM, "labels shuffled apart", labels_apart, "labels-unrelated"),
    *reported_inputs.SET_BY,
    *reported_weights.SET_BY,
]  # fmt: skip

HELD_OUT = [
    _case(healthy.CNN_ADAM, "inputs divided to 0", whole_inputs, "constant-data"),
    _case(healthy.CNN_SGD, "results of ReLU unassigned", unassigned, "no-activation"),
    _case(healthy.VIT, "positions of samples", positions_of_samples, "samples-mixed"),
    _case(healthy.CNN_ADAM, "layers in a list", listed, "hidden-parameters"),
    _case(healthy.LSTM, "a tensor that is no parameter", mixed, "hidden-parameters"),
    _case(healthy.CNN_SGD, "a group of rate 0", still, "rate-zero"),
    _case(healthy.DEEP_RELU, "the first layer's rate 0", first_still, "rate-zero"),
    _case(healthy.GPT, "bfloat16 weights, rate 3e-5", slowly_in_bfloat16(100.0), "rounded-away"),
    _case(NORMED_REGRESSION, "batches of 2", few(2), "batch-norm-starved"),
    _case(ONE_VALUE, "(B,) less (B, 1)", with_loss(subtracting), "broadcast-loss"),
    _case(healthy.CNN_ADAM, "kl_div of a softmax", with_loss(kl_of_shares), "no-log"),
    _case(TWO_CIRCLES, "nn.Softmax behind one unit", one_share, "softmax-of-one"),
    _case(healthy.VIT, "log_softmax(dim=0)", with_loss(nll_over_samples), "softmax-over-samples"),
    _case(healthy.AUTOENCODER, "sigmoid on the outputs", ending(nn.Sigmoid),
          "targets-out-of-range"),
    _case(healthy.LSTM, "labels not shifted", not_shifted, "target-is-input"),
    _case(healthy.LSTM, "both directions", both_ways, "future-leak"),
    _case(CENTRED, "mean over the batch", attributes(axis=0), "samples-mixed"),
    _case(HEADS, "heads by view", attributes(scrambled=True), "reshape-scrambles"),
    _case(BRANCH, ".data in a branch", attributes(cut=True), "gradient-cut"),
    _case(healthy.CNN_ADAM, "two batches by turns", one_batch(2), "same-batch"),
    _case(healthy.CNN_SGD, "sorted by label", sorted_by_label, "unshuffled"),
    _case(COSINES_OF_WORDS, "no temperature", attributes(temperature=1.0), "bounded-logits"),
    _case(healthy.MLP_DROPOUT, "keep for drop", kept(0.95), "dropout-too-high"),
    _case(healthy.CNN_ADAM, "the loss with a minus", negated, "unbounded-loss"),
    _case(healthy.VIT, "labels shuffled apart", labels_apart, "labels-unrelated"),
    *reported_inputs.HELD_OUT,
    *reported_weights.HELD_OUT,
]  # fmt: skip
TWINS = {case.twin.name: case.twin for case in (*SET_BY, *HELD_OUT)}
REPORTED = {case.name: case for case in (*SET_BY, *HELD_OUT)}
assert len(REPORTED) == len(SET_BY) + len(HELD_OUT), "two cases have one name"
