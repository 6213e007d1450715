"""Parameters that several layers share: what each layer does is estimated from its rows."""

import copy
import itertools
import math
from collections import defaultdict
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from adiv_monitor import Monitor, StepReport

WORDS, WIDTH, TOKENS, SEEN = 40, 12, 1024, 96
CALIBRATED = ("update_cosine", "gradient_cosine", "effective_lr", "diagonal_cosine")


class Language(nn.Module):
    """A word table tied to the read-out, unless each use is to have its own copy."""

    def __init__(self, *, tied: bool = True) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, WORDS)
        self.head.weight = self.embed.weight if tied else nn.Parameter(self.embed.weight.data * 1)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.embed(x)
        logits: Tensor = self.head(hidden + torch.tanh(self.inner(hidden)))
        return logits


def words(n: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Return words with a frequency as in texts: few words are most of them."""
    generator = torch.Generator().manual_seed(seed)
    often = 1 / torch.arange(1.0, WORDS + 1)
    x = torch.multinomial(often, n, replacement=True, generator=generator)
    return x, (7 * x + 3) % WORDS


def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return functional.cross_entropy(model(x), y)


class Step:
    """A step that can be measured any number of times, also by an untied twin."""

    def __init__(self, *, tied: bool = True) -> None:
        torch.manual_seed(0)
        self.model = Language(tied=tied).double()
        nn.init.normal_(self.model.embed.weight, std=0.3)
        if not tied:
            self.model.head.weight.data.copy_(self.model.embed.weight)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), 0.01)
        for _ in range(3):
            self.optimizer.zero_grad()
            loss_of(self.model, *words(TOKENS)).backward()
            self.optimizer.step()

    def measured(
        self,
        max_rows: int | None,
        seed: int = 0,
        backward: Callable[[nn.Module], None] = lambda m: loss_of(m, *words(TOKENS)).backward(),
        before_step: Callable[[nn.Module], object] = lambda m: None,
    ) -> tuple[StepReport, dict[str, float]]:
        """Return the report, and each layer's change of the loss by separate copies."""
        model, optimizer = copy.deepcopy((self.model, self.optimizer))
        with Monitor(model, optimizer, max_rows=max_rows, seed=seed, on_error="raise") as monitor:
            optimizer.zero_grad()
            backward(model)
            raw = model.embed.weight.grad.clone()
            before_step(model)
            factor = float(model.embed.weight.grad.norm() / raw.norm())
            before = {n: p.detach().clone() for n, p in model.named_parameters()}
            optimizer.step()
        taken = {n: before[n] - p.detach() for n, p in model.named_parameters()}
        apart = Language(tied=False).double()
        for path in ("embed", "inner", "head"):
            for name, p in apart.get_submodule(path).named_parameters():
                p.data.copy_(before.get(f"{path}.{name}", before["embed.weight"]))
        backward(apart)
        descents: dict[str, float] = defaultdict(float)
        for name, p in apart.named_parameters():
            w = taken.get(name, taken["embed.weight"])
            descents[name.split(".")[0]] += factor * float((w * p.grad).sum())
        return monitor.latest, descents


def in_three(model: nn.Module) -> None:
    for seed in range(3):
        loss_of(model, *words(TOKENS // 2, seed)).backward()


def one_use_more_often(model: nn.Module) -> None:
    """Run passes with different sets of uses."""
    in_three(model)
    model.embed(words(50)[0]).square().sum().backward()


def clipped(model: nn.Module) -> object:
    return nn.utils.clip_grad_norm_(model.parameters(), 0.01)


WAYS: dict[str, dict[str, Callable[[nn.Module], object]]] = {
    "plain": {},
    "micro-batches": {"backward": in_three},
    "clipped": {"backward": in_three, "before_step": clipped},
    "one more often": {"backward": one_use_more_often},
}


@pytest.mark.parametrize("way", WAYS)
def test_all_rows_tell_each_use_its_own_part_of_the_descent(way: str) -> None:
    report, expected = Step().measured(None, **WAYS[way])
    assert any("'embed', 'head'" in x and "from rows alone" in x for x in report.notes)
    for path, reading in report.layers.items():
        assert reading.descent == pytest.approx(expected[path], rel=1e-9)
    assert report.descent == pytest.approx(sum(expected.values()), rel=1e-9)


def test_errors_of_sampled_rows_are_calibrated() -> None:
    """Relative errors are small in the root mean square, and seldom beyond three errors."""
    step = Step()
    truth = step.measured(None)[0].layers
    off: dict[tuple[str, str], list[float]] = defaultdict(list)
    beyond: dict[str, list[bool]] = defaultdict(list)
    for seed in range(30):
        layers = step.measured(SEEN, seed)[0].layers
        for path, name in itertools.product(("embed", "head"), CALIBRATED):
            expected = getattr(truth[path], name)
            difference = abs(getattr(layers[path], name) - expected)
            off[path, name].append(difference / abs(expected))
            error = layers[path].standard_error.get(name, 0.0)
            beyond[path].append(difference > 3 * error + 1e-7)
    assert all(np.mean(found) <= 0.02 for found in beyond.values())
    assert all(math.sqrt(np.square(found).mean()) < 0.15 for found in off.values())
