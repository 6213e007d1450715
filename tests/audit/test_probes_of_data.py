"""What is asked about data, and what of them counts: each bug is named, its healthy kin are not."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from computes import Computes
from made_records import STILL
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Adam, Optimizer
from trial_setups import (
    Row,
    assert_said,
    batches,
    each_of,
    loss,
    mlp,
    of_outputs,
    said,
    setup,
    told,
)

from adiv_monitor.audit.training.batches import taken
from adiv_monitor.audit.training.setup import Setup
from adiv_monitor.diagnosis.record import Fact

Of = Callable[[nn.Module, Any], Tensor]


def adam(model: nn.Module) -> Optimizer:
    return Adam(model.parameters(), lr=0.01)


def one_output() -> nn.Module:
    return nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 1))


def of(compare: Callable[[Any, Tensor], Tensor], **changes: Any) -> Callable[[], Setup]:
    """A setup whose loss compares outputs with targets."""
    return lambda: setup(loss=of_outputs(compare), **changes)


def by(of_batch: Of, **changes: Any) -> Callable[[], Setup]:
    return lambda: setup(loss=of_batch, **changes)


def changed(
    change: Callable[..., Any], of_batch: Of = loss, make: Callable[[], nn.Module] = mlp
) -> Callable[[], Setup]:
    """A setup whose batches are made of inputs and labels."""
    made = tuple(change(x, y) for x, y in batches())
    return lambda: setup(batches=made, loss=of_batch, model=make())


# Targets in another order than their inputs


def of_places(z: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(z.flatten(0, 1), y.flatten())


def tags(move: Callable[[Tensor], Tensor], both: bool = False) -> Setup:
    """A class for each place, which a recurrent network sees up to there, or from both ends."""
    x = torch.randn(4, 40, 12, 4, generator=torch.Generator().manual_seed(0))
    made = tuple((part, move((part[..., 0] > 0).long())) for part in x)
    torch.manual_seed(0)
    gru = nn.GRU(4, 12, batch_first=True, bidirectional=both)
    parts = {"gru": gru, "head": nn.Linear(24 if both else 12, 2)}
    model = Computes(lambda m, x: m.head(m.gru(x)[0]), **parts)
    return setup(model=model, batches=made, loss=of_outputs(of_places))


def next_values() -> Setup:
    x = torch.randn(4, 24, 8, 4, generator=torch.Generator().manual_seed(0))
    made = tuple((part[:, :-1], part[:, 1:]) for part in x)
    return setup(model=nn.Linear(4, 4), batches=made, loss=of_outputs(F.mse_loss))


def late() -> Setup:
    made = batches(6)
    return setup(batches=tuple((x, made[i - 1][1]) for i, (x, _) in enumerate(made)))


def pixels(move: Callable[[Tensor], Tensor]) -> Callable[[], Setup]:
    def make() -> Setup:
        y = (torch.rand(2, 48, 5, 5) > 0.7).float()
        made = tuple((part[:, None] + 0.3 * torch.randn(48, 1, 5, 5), move(part)) for part in y)
        loss = of_outputs(lambda z, y: F.mse_loss(z[:, 0], y))
        return setup(model=nn.Conv2d(1, 1, 3, padding=1), batches=made, loss=loss)

    return make


MISPLACED = "The targets do not belong to the places of their outputs: "
MOVED: list[Row] = [
    ("targets-moved", "reversed", lambda: tags(lambda y: y.flip(1)),
     f"act: {MISPLACED}reversed along axis 1, they"),
    ("targets-moved", "reversed, seen from both ends", lambda: tags(lambda y: y.flip(1), both=True),
     f"watch: {MISPLACED}reversed along axis 1, they"),
    ("targets-moved", "shifted", lambda: tags(lambda y: y.roll(-2, 1)),
     f"watch: {MISPLACED}shifted by 2 along axis 1,"),
    ("targets-moved", "of the sample before", lambda: tags(lambda y: y.roll(1, 0)),
     "shifted by -1 along the samples, they fit better"),
    ("targets-moved", "transposed", lambda: tags(lambda y: y.t().reshape(y.shape)),
     f"act: {MISPLACED}axes 0 and 1 transposed, they"),
    ("targets-moved", "at their places", lambda: tags(lambda y: y), ""),
    ("targets-moved", "the next values", next_values, ""),
    ("targets-moved", "of the batch before", late, "taken from the batch behind, they fit better"),
    ("targets-moved", "of the batch", by(loss, batches=batches(6)), ""),
    ("targets-moved", "pixels transposed", pixels(lambda y: y.mT), "axes 1 and 2 transposed, they"),
    ("targets-moved", "pixels turned", pixels(lambda y: y.rot90(1, (1, 2))), "turned by 270°"),
    ("targets-moved", "pixels", pixels(lambda y: y), ""),
    ("targets-moved", "of other images", pixels(lambda y: y[torch.randperm(48)]), ""),
]  # fmt: skip


# Targets that are drawn anew


def noised(again: bool, noise: float = 2.0) -> Of:
    def of(model: nn.Module, batch: Any) -> Tensor:
        drawn = noise * torch.randn_like(batch[0][:, :3])
        other = noise * torch.randn_like(drawn) if again else drawn
        return F.mse_loss(model(batch[0] + F.pad(drawn, (0, 9))), batch[0][:, :3] + other)

    return of


def diffused(level: float) -> Of:
    def of(model: nn.Module, batch: Any) -> Tensor:
        x = batch[0] / batch[0].std()
        e = torch.randn_like(x)
        return F.mse_loss(model((1 - level**2) ** 0.5 * x + level * e), e[:, :3])

    return of


def other_noise(model: nn.Module, batch: Any) -> Tensor:
    """Compare with noise that is drawn behind the model."""
    predicted = model(batch[0] + torch.randn_like(batch[0]))
    return F.mse_loss(predicted, torch.randn_like(predicted))


def hidden_places(model: nn.Module, batch: Any) -> Tensor:
    hidden = torch.rand(batch[0].shape) < 0.05
    return ((model(batch[0] * ~hidden) - batch[0][:, :3]) * hidden[:, :3]).square().mean()


DRAWN: list[Row] = [
    ("labels-unrelated", "drawn again", by(noised(True)), "those that randn_like"),
    ("labels-unrelated", "drawn once", by(noised(False)), ""),
    ("labels-unrelated", "little of them", by(noised(True, 0.3)), ""),
    ("labels-unrelated", "noise that the inputs hardly hold", by(diffused(0.1)),
     "the noise that randn_like"),
    ("labels-unrelated", "other noise than the inputs hold", by(other_noise), "those that randn"),
    ("labels-unrelated", "noise", by(diffused(0.7)), ""),
    ("labels-unrelated", "hidden places", by(hidden_places), ""),
]  # fmt: skip


# Parts that never count in the loss


def hinge(output: Tensor, y: Tensor) -> Tensor:
    return (1 - output * y).relu()


def two(
    each: Callable[[Tensor, Tensor], Tensor],
    change: Callable[[Tensor], Tensor] = lambda y: 2 * y - 1,
) -> Callable[[], Setup]:
    """Of two classes; by default, −1 and 1."""
    of_batch = of_outputs(lambda z, y: each(z[:, 0], y.float()).mean())
    return changed(lambda x, y: (x, change(y % 2)), of_batch, make=one_output)


def weighed(dtype: torch.dtype, each: Callable[[Tensor, Tensor], Tensor]) -> Callable[[], Setup]:
    weights = (torch.arange(32) % 4 > 0).to(dtype)

    def of_batch(model: nn.Module, batch: Any) -> Tensor:
        weighted = each(model(batch[0])[:, 0], batch[1].float()) * batch[2]
        return weighted.sum() / batch[2].sum()

    return changed(lambda x, y: (x, y % 2, weights), of_batch, make=one_output)


def booleans() -> Setup:
    """Masks, which are no labels."""

    def of_masked(model: nn.Module, batch: Any) -> Tensor:
        return F.cross_entropy(model(batch[0])[batch[1]], batch[2][batch[1]])

    chance = torch.Generator().manual_seed(0)
    given = [torch.randint(7, (4, 9), generator=chance) for _ in range(3)]
    made = tuple((x, torch.rand(4, 9, generator=chance) < 0.3, x % 4) for x in given)
    return setup(model=Tagged(pixels=False), batches=made, loss=of_masked, optimizer=adam)


def squared(z: Tensor, y: Tensor) -> Tensor:
    return (z - y).square()


class Tagged(nn.Module):
    """Classes for each token, or for each pixel."""

    def __init__(self, *, pixels: bool) -> None:
        super().__init__()
        self.table = nn.Embedding(7, 8)
        self.head = nn.Conv2d(1, 4, 1) if pixels else nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x if x.ndim == 4 else self.table(x))


def tagged(of_batch: Of, labels: Any, *, pixels: bool = False) -> Callable[[], Setup]:
    chance = torch.Generator().manual_seed(0)
    shape = (4, 1, 5, 5) if pixels else (4, 9)
    given = [torch.randint(7, shape, generator=chance) for _ in range(3)]
    made = tuple((x.float() if pixels else x, labels(x[:, 0] if pixels else x)) for x in given)
    return lambda: setup(model=Tagged(pixels=pixels), batches=made, loss=of_batch, optimizer=adam)


def of_flat(ignored: int) -> Of:
    return of_outputs(lambda z, y: F.cross_entropy(
        z.flatten(0, 1), y.flatten(), ignore_index=ignored))  # fmt: skip


def modulo(x: Tensor) -> Tensor:
    return x % 4


def unlabelled(x: Tensor) -> Tensor:
    return torch.where(x % 4 > 0, x % 4, 255)


def filled(x: Tensor) -> Tensor:
    lengths = torch.tensor([[4], [9], [6], [7]])
    return torch.where(torch.arange(9) < lengths, x % 3 + 1, 0)


def next_ones(model: nn.Module, batch: Any) -> Tensor:
    x = batch[0]
    return F.cross_entropy(model(x[:, :-1]).flatten(0, 1), x[:, 1:].flatten() % 4)


of_pixels = of_outputs(lambda z, y: F.cross_entropy(z, y, ignore_index=0))
of_ignored = of_outputs(lambda z, y: F.cross_entropy(z, y, ignore_index=255))
of_chosen = of_outputs(lambda z, y: F.cross_entropy(z[y > 0], y[y > 0]))
of_masked = of_outputs(lambda z, y: (F.cross_entropy(z, y, reduction="none") * (y > 0)).mean())


def gathered(axis: int) -> Of:
    def of(model: nn.Module, batch: Any) -> Tensor:
        picked = model(batch[0]).gather(axis, batch[1][:, None])[:, 0]
        return (picked - batch[0][:, 0]).square().mean()

    return of


def corner(size: int) -> Callable[[], Setup]:
    """Maps, of which the loss reads a corner."""
    chance = torch.Generator().manual_seed(0)
    made = tuple(
        (torch.randn(6, 3, 8, 8, generator=chance), torch.randint(3, (6, 8, 8), generator=chance))
        for _ in range(4)
    )
    of_batch = of_outputs(lambda z, y: F.cross_entropy(z[..., :size, :size], y[..., :size, :size]))
    return lambda: setup(model=nn.Conv2d(3, 3, 3, padding=1), batches=made, loss=of_batch)


def lengths(frames: int) -> Callable[[], Setup]:
    """Lines whose lengths leave the other frames out."""
    chance = torch.Generator().manual_seed(0)
    made = tuple(
        (torch.randn(4, 12, 12, generator=chance), torch.randint(1, 3, (4, 2), generator=chance))
        for _ in range(2)
    )

    def compare(z: Tensor, y: Tensor) -> Tensor:
        given = z.log_softmax(-1).transpose(0, 1)
        of_both = (torch.full((4,), n) for n in (frames, 2))
        return F.ctc_loss(given, y, *of_both, zero_infinity=True)

    return of(compare, batches=made)


NO_TWOS = tuple((x[y < 2], y[y < 2]) for x, y in batches())
LAST = tuple((x[:, None].expand(-1, 5, -1), y) for x, y in batches())
UNTAUGHT: list[Row] = [
    ("class-untaught", "a hinge of 0 and 1", two(hinge, lambda y: y), "label 0 has a gradient"),
    ("class-untaught", "a hinge", two(hinge), ""),
    ("class-untaught", "a margin that is kept", two(lambda z, y: (0.1 - z * y).relu()), ""),
    ("class-untaught", "samples without a label",
     two(lambda z, y: squared(z, y) * (y >= 0),
         lambda y: y - (torch.arange(32) % 4 == 0) * 5), ""),
    ("class-untaught", "weights", weighed(torch.float32, squared), ""),
    ("class-untaught", "a mask", weighed(torch.bool, squared), ""),
    ("class-untaught", "weights, of a hinge", weighed(torch.float32, hinge), "label 0 has"),
    ("class-untaught", "a mask, of a hinge", weighed(torch.bool, hinge), "label 0 has a gradient"),
    ("class-untaught", "a mask of places", booleans, ""),
    ("class-untaught", "ignored", tagged(of_flat(0), modulo), "label 0 has a gradient"),
    ("class-untaught", "chosen", tagged(of_chosen, modulo), "label 0 has a gradient"),
    ("class-untaught", "pixels", tagged(of_pixels, modulo, pixels=True), "label 0 has a gradient"),
    ("class-untaught", "masked pixels", tagged(of_masked, modulo, pixels=True), "label 0 has"),
    ("class-untaught", "ignored, and no class", tagged(of_ignored, unlabelled, pixels=True), ""),
    ("class-untaught", "all", tagged(of_flat(-100), modulo), ""),
    ("class-untaught", "padding", tagged(of_flat(0), filled), ""),
    ("class-untaught", "padding before", tagged(of_flat(0), lambda x: filled(x).flip(1)), ""),
    ("class-untaught", "-100",
     tagged(of_flat(-100), lambda x: torch.where(x % 4 > 0, x % 4, -100)), ""),
    ("class-untaught", "unlabelled", tagged(of_flat(0), lambda x: (x % 4) * (x > 4)), ""),
    ("class-untaught", "next tokens", tagged(next_ones, lambda x: x), ""),
    ("class-untaught", "gathered along the classes", by(gathered(1)), ""),
    ("class-untaught", "a class that never occurs", of(F.cross_entropy, batches=NO_TWOS),
     "Of the 3 classes of the outputs, 1 have no sample among 180 labels"),
    ("class-untaught", "a corner", corner(3),
     "Of the 8 places along axis 2 of the outputs, 5 never"),
    ("class-untaught", "most", corner(7), ""),
    ("class-untaught", "all places", corner(8), ""),
    ("class-untaught", "short lines", lengths(4), "Of the 12 places along axis 1 of the outputs, "),
    ("class-untaught", "whole lines", lengths(12), "untold: no output and no class"),
    ("class-untaught", "all samples", by(loss), ""),
    ("class-untaught", "the first sample", of(lambda z, y: F.cross_entropy(z[:1], y[:1])),
     "Of the 32 samples of a batch of the outputs, 31 never"),
    ("class-untaught", "one place that is chosen",
     of(lambda z, y: F.cross_entropy(z[:, -1], y), batches=LAST), ""),
]  # fmt: skip


# Parts of the batch that the loss never reads


def views(uses: tuple[int, int], change: Any = lambda x: x + 1) -> Callable[[], Setup]:
    def of_batch(model: nn.Module, batch: Any) -> Tensor:
        one, other = (model(batch[i]) for i in uses)
        return F.cross_entropy(one @ other.T, torch.arange(len(one)))

    return changed(lambda x, y: (x, change(x), y.float()), of_batch)


def flagged(kind: torch.dtype, masked: bool) -> Callable[[], Setup]:
    def of_batch(model: nn.Module, batch: Any) -> Tensor:
        x, y, mask = batch
        each = F.cross_entropy(model(x), y, reduction="none")
        return each[mask > 0].mean() if masked else each.mean()

    return changed(lambda x, y: (x, y, (torch.arange(32) % 3 > 0).to(kind)), of_batch)


def actions(discrete: bool, anew: bool) -> Callable[[], Setup]:
    """Stored actions and their rewards, or other actions that are drawn."""
    chance = torch.Generator().manual_seed(0)
    stored = torch.randint(0, 3, (32,), generator=chance)
    if not discrete:
        stored = torch.randn(32, 3, generator=chance)

    def of_batch(model: nn.Module, batch: Any) -> Tensor:
        made = model(batch[0])
        kind = torch.distributions
        policy = kind.Categorical(logits=made) if discrete else kind.Normal(made, 1.0)
        log = policy.log_prob(policy.sample() if anew else batch[1]).reshape(32, -1).sum(1)
        return -(log * batch[2]).mean()

    made = ((batches()[0][0], stored, torch.randn(32, generator=chance)),)
    return lambda: setup(loss=of_batch, batches=made)


def rewarded(z: Tensor, y: Tensor) -> Tensor:
    """Samples that are rewarded at once are meant."""
    policy = torch.distributions.Categorical(logits=z)
    chosen = policy.sample()
    return -(policy.log_prob(chosen) * (chosen == y)).mean()


KINDS = {"bool": torch.bool, "float": torch.float32, "int": torch.int64}


def columns(moves: bool, alike: bool = False) -> Setup:
    """Three outputs, each compared with its column of the targets, or all with the first."""

    def of_batch(model: nn.Module, batch: Any) -> Tensor:
        made, wanted = model((not alike) * batch[0]), batch[1]
        each = [(made[:, k] - wanted[:, k * moves]).square().mean() for k in range(3)]
        return torch.stack(each).sum()

    return setup(batches=tuple((x, x[:, :3].cos()) for x, _ in batches()), loss=of_batch)


UNREAD: list[Row] = [
    ("batch-part-unread", "columns", lambda: columns(moves=False), "columns 1, 2 of tensor 1"),
    ("batch-part-unread", "all columns", lambda: columns(moves=True), ""),
    ("batch-part-unread", "outputs that are alike", lambda: columns(moves=True, alike=True), ""),
    ("batch-part-unread", "the second view", views((0, 0)), "watch: The loss never reads tensor 1"),
    ("batch-part-unread", "the first view", views((1, 1)), "watch: The loss never reads tensor 0"),
    ("batch-part-unread", "both views", views((0, 1)), ""),
    ("batch-part-unread", "the same again", views((0, 0), lambda x: x.clone()), ""),
    ("batch-part-unread", "another shape", views((0, 0), lambda x: x[:, :4]), ""),
    ("batch-part-unread", "numbers of samples", views((0, 0), lambda x: x.round().long()), ""),
    *(("batch-part-unread", f"a flag, {name}", flagged(kind, masked=False), "reads tensor 2 of")
      for name, kind in KINDS.items()),
    *(("batch-part-unread", f"a flag that counts, {name}", flagged(kind, masked=True), "")
      for name, kind in KINDS.items()),
    ("batch-part-unread", "actions drawn again", actions(True, anew=True), "draws as many numbers"),
    ("batch-part-unread", "moves drawn again", actions(False, anew=True), "draws as many numbers"),
    ("batch-part-unread", "actions", actions(True, anew=False), ""),
    ("batch-part-unread", "moves", actions(False, anew=False), ""),
    ("batch-part-unread", "rewarded at once", of(rewarded), ""),
]  # fmt: skip


# Weights of classes, padding, penalties


def weighted(*weight: float) -> Callable[[], Setup]:
    """Class 2 is ten times as rare as the others."""
    compare = lambda z, y: F.cross_entropy(z, y, torch.tensor(weight))  # noqa: E731
    rare = torch.arange(32) % 16 == 0
    return changed(lambda x, y: (x, torch.where(rare, 2, y % 2)), of_outputs(compare))


LINES = torch.tensor([[3, 1, 2, 0, 0], [2, 2, 4, 1, 0], [4, 0, 0, 0, 0], [1, 2, 0, 0, 0]])


def words(of_batch: Of, lines: Tensor = LINES) -> Callable[[], Setup]:
    make = lambda: nn.Sequential(nn.Embedding(5, 8), nn.Linear(8, 5))  # noqa: E731
    return lambda: setup(model=make(), batches=((lines,),), loss=of_batch)


def next_words(**settings: Any) -> Of:
    def of(model: nn.Module, batch: Any) -> Tensor:
        (lines,) = batch
        flat = model(lines[:, :-1]).flatten(0, 1)
        return F.cross_entropy(flat, lines[:, 1:].flatten(), **settings)

    return of


def masked(model: nn.Module, batch: Any) -> Tensor:
    (lines,) = batch
    each = F.cross_entropy(model(lines).transpose(1, 2), lines, reduction="none")
    return (each * (lines > 0)).sum() / (lines > 0).sum()


def shifted(model: nn.Module, batch: Any) -> Tensor:
    """The last place, which has no next word, is ignored."""
    (lines,) = batch
    labels = F.pad(lines[:, 1:], (0, 1), value=-100)
    return F.cross_entropy(model(lines).transpose(1, 2), labels)


def penalised(weight: float) -> Of:
    return of_outputs(lambda z, y: F.cross_entropy(z, y) + weight * z.square().mean())


def prized(weight: float) -> Of:
    """A spread is rewarded for its own sake."""
    return lambda m, b: F.mse_loss(z := m(b[0]), b[0][:, :3]) - weight * z.std()


def tasks(model: nn.Module, batch: Any) -> Tensor:
    outputs = model(batch[0])
    other = F.mse_loss(outputs[:, 0], batch[0][:, 0])
    return F.cross_entropy(outputs, batch[1]) + 100.0 * other


def codebook(taught_alone: bool) -> Setup:
    """A term that may be the only one to teach some parameters is no penalty then."""
    model = nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 3))
    model.code = nn.Parameter(torch.ones(4), requires_grad=taught_alone)

    def of_batch(model: nn.Module, batch: Any) -> Tensor:
        return penalised(100.0)(model, batch) + model.code.square().mean()

    return setup(model=model, loss=of_batch, optimizer=adam)


ENDS = torch.tensor([[3, 1, 2, 0], [2, 2, 4, 0], [4, 1, 1, 0]])
COUNTS: list[Row] = [
    ("class-weights", "counts in place of their inverses", weighted(8.0, 8.0, 1.0), "weights"),
    ("class-weights", "the root of the inverses", weighted(1.0, 1.0, 3.0), ""),
    ("class-weights", "the inverses", weighted(1.0, 1.86, 9.75), ""),
    ("class-weights", "those of other classes", weighted(9.75, 1.0, 1.86), "would balance them"),
    ("class-weights", "one left out", weighted(0.0, 1.0, 1.0), ""),
    ("padding-counts", "at the end", words(next_words()), "38% of the places that count"),
    ("padding-counts", "at the beginning", words(next_words(), LINES.flip(1)), "are padding"),
    ("padding-counts", "beside an ignored place", words(shifted, F.pad(LINES, (0, 6))), "padding"),
    ("padding-counts", "ignored", words(next_words(ignore_index=0)), ""),
    ("padding-counts", "of weight 0",
     words(next_words(weight=torch.tensor([0.0, 1, 1, 1, 1]))), ""),
    ("padding-counts", "masked", words(masked), ""),
    ("padding-counts", "words that occur anywhere", words(next_words(), torch.randint(
        5, (4, 8), generator=torch.Generator().manual_seed(0))), ""),
    ("padding-counts", "one sign for the end", words(next_words(), ENDS), ""),
    ("padding-counts", "a mask", words(next_words(), (LINES > 0).long()), ""),
    ("padding-counts", "a fixed end", words(next_words(), LINES[:1].expand(4, 5)), ""),
    ("penalty-dominates", "a large one", by(penalised(100.0), optimizer=adam), "act: A penalty"),
    ("penalty-dominates", "a small one", by(penalised(1e-3), optimizer=adam), ""),
    ("penalty-dominates", "two tasks", by(tasks), ""),
    ("penalty-dominates", "none", by(loss), ""),
    ("penalty-dominates", "a spread", by(prized(10.0), optimizer=adam), "for its own sake"),
    ("penalty-dominates", "a little spread", by(prized(0.01), optimizer=adam), ""),
    ("penalty-dominates", "one that alone teaches", lambda: codebook(taught_alone=True), ""),
    ("penalty-dominates", "one of frozen ones", lambda: codebook(taught_alone=False), "A penalty"),
]  # fmt: skip


# Data that differ too little, and states of other samples


def ignoring(index: int) -> Of:
    return of_outputs(lambda z, y: F.cross_entropy(z, y, ignore_index=index))


def at_boundary(also: bool) -> Callable[[], Setup]:
    """Values that are all the same, of the data or of a boundary's alone."""

    def of_batch(model: nn.Module, batch: Any) -> Tensor:
        x, other, y = batch
        found = model(x + other)[:, 0]
        return F.mse_loss(found, y) + (F.mse_loss(found, x[:, 0]) if also else 0)

    return changed(lambda x, y: (x, x.flip(0), torch.zeros(len(x))), of_batch)


def copying(model: nn.Module, batch: Any) -> Tensor:
    return (model(batch[0]) - batch[0][:, :3]).square().mean()


def repeated(rows: Tensor) -> Callable[[], Setup]:
    return changed(lambda x, y: (x[rows], y[rows]))


def truth_table() -> Setup:
    bits = torch.arange(32)[:, None] // torch.tensor([1, 2]) % 2
    return setup(model=nn.Linear(2, 3), batches=3 * ((bits.float(), bits.sum(1) % 2),))


def again(copies: bool) -> Setup:
    once = batches(1)[0]
    given = [tuple(x.clone() for x in once) if copies else once for _ in range(8)]
    return setup(batches=taken(given, 8, torch.device("cpu")))


class Carries(nn.Module):
    """A recurrent network that begins with a state of the batch before, or with a fresh one."""

    def __init__(self, carries: bool = True) -> None:
        super().__init__()
        self.gru, self.head, self.carries = nn.GRU(1, 8, batch_first=True), nn.Linear(8, 1), carries
        self.state: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        out, state = self.gru(x, self.state if self.carries else None)
        self.state = state.detach()
        return self.head(out)


class Queue(nn.Module):
    """Compares samples with those of the batch before, as contrastive learning does."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.queue = nn.Linear(6, 4), nn.Buffer(torch.ones(16, 4))

    def forward(self, x: Tensor) -> Tensor:
        z = self.layer(x[..., 0])
        scores = z @ self.queue.T
        self.queue = z.detach()
        return scores[..., None]


def series(model: Callable[[], nn.Module], shuffled: bool = True) -> Callable[[], Setup]:
    """Waves in windows of six: later ones go on, or are of other waves."""
    made = torch.Generator().manual_seed(0)
    phase = 6.28 * torch.rand(16, 1, generator=made)
    waves = [torch.sin(phase + 0.4 * torch.arange(6.0 * i, 6 * i + 7)) for i in range(4)]
    if shuffled:
        waves = [wave[torch.randperm(16, generator=made)] for wave in waves]
    data = tuple((w[:, :6, None], w[:, 1:, None]) for w in waves)
    compare = of_outputs(lambda z, y: F.mse_loss(z.mean(1), y.mean(1)))
    return lambda: setup(model=model(), batches=data, loss=compare)


def normed() -> Setup:
    layers = nn.Linear(12, 8), nn.BatchNorm1d(8), nn.Dropout(), nn.Linear(8, 3)
    return setup(model=nn.Sequential(*layers))


def beside(column: Callable[[Tensor], Tensor]) -> Callable[[], Setup]:
    """Inputs with a column of the labels."""
    made = tuple((torch.cat([x, column(y.float())[:, None]], 1), y) for x, y in batches())
    return lambda: setup(model=nn.Linear(13, 3), batches=made)


LEAKED: list[Row] = [
    ("target-leak", "moved", beside(lambda y: 3 - 0.5 * y), "Entry 12 of input 'input'"),
    ("target-leak", "one class of three", beside(lambda y: (y == 1).float()), ""),
    ("target-leak", "noise", beside(lambda y: y + 1e-3 * torch.arange(len(y)).cos()), ""),
    ("target-leak", "none", lambda: setup(), ""),
]
ALIKE: list[Row] = [
    ("constant-data", "inputs", changed(lambda x, y: (0 * x, y)), "inputs"),
    ("constant-data", "labels", changed(lambda x, y: (x, 0 * y)), "labels"),
    ("constant-data", "two labels", changed(lambda x, y: (x, y.clamp(max=1))), ""),
    ("constant-data", "all but those ignored",
     changed(lambda x, y: (x, y.clamp(max=1)), ignoring(0)), "all others are 1"),
    ("constant-data", "ignored", changed(lambda x, y: (x, 0 * y), ignoring(0)), "ignore"),
    ("constant-data", "labels that differ", changed(lambda x, y: (x, y), ignoring(0)), ""),
    ("constant-data", "values", at_boundary(also=False), "labels"),
    ("constant-data", "values at a boundary", at_boundary(also=True), ""),
    ("constant-data", "labels that no loss uses", changed(lambda x, y: (x, 0 * y), copying), ""),
    ("same-batch", "four samples", repeated(torch.arange(32) % 4), "At most 12% of the samples"),
    ("same-batch", "twenty samples", repeated(torch.arange(32) % 20), ""),
    ("same-batch", "few whole numbers, equal by chance", truth_table, ""),
    ("same-batch", "states that are one-hot",
     changed(lambda x, y: (F.one_hot(y, 12).float(), y)), ""),
    ("same-batch", "one batch, which may be meant", lambda: again(copies=False), "note: "),
    ("same-batch", "copies of a batch", lambda: again(copies=True), "act: "),
    ("state-carried", "to other samples", series(Carries), "act: "),
    ("state-carried", "to what goes on", series(Carries, shuffled=False), ""),
    ("state-carried", "none", series(partial(Carries, carries=False)), ""),
    ("state-carried", "a queue", series(Queue), "watch: "),
    ("state-carried", "statistics", normed, ""),
]  # fmt: skip
TRAINED = ("class-untaught", "penalty-dominates")  # asked of a trained copy, as an audit does
ROWS = [*MOVED, *DRAWN, *UNTAUGHT, *UNREAD, *COUNTS, *LEAKED, *ALIKE]


@each_of(ROWS)
def test_a_fault_is_named_and_what_is_like_it_is_not(
    question: str, make: Callable[[], Setup], part: str
) -> None:
    assert_said(question, make(), part, trained=question in TRAINED)


def test_numbers_are_those_of_the_data() -> None:
    """Gathered along the samples, labels take the first column of the first three."""
    facts = told("class-untaught", setup(loss=gathered(0)), trained=True).facts
    assert {f.words["of"]: f.numbers["unread"] for f in facts} == {
        "samples of a batch": 29,
        "columns": 2,
    }
    assert "Of the 3 columns" in said("class-untaught", *facts[1:], losses=STILL)[0]
    for level in (0.1, 0.7):
        (fact,) = told("labels-unrelated", setup(loss=diffused(level))).facts
        assert fact.numbers["held"] == pytest.approx(level**2, rel=0.15)
    (fact,) = told("targets-moved", tags(lambda y: y.flip(1))).facts
    assert fact.numbers["own"] < 0.1 and fact.numbers["best"] > 0.4


def test_a_state_that_is_kept_on_purpose_is_a_note_where_the_loss_falls() -> None:
    (sentence,) = said("state-carried", Fact("", {"outputs": 1.0}, {"of": "batch"}))
    assert sentence.startswith("note: ")
