"""Plain hooks, where uses of parameters are known, read what a watch of all functions reads.

And where a model changes in mid-run, no reading is wrong and none is missing for long.
"""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrizations

from adiv_monitor import Monitor
from adiv_monitor.capture import trace
from adiv_monitor.report import StepReport

Step = Callable[[int, nn.Module], None]


class Tied(nn.Module):
    """Its head uses the embedding's weight, by a function of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm, self.mix = nn.Embedding(11, 6), nn.LayerNorm(6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        tokens = (x[:, :4].abs() * 5).long() % 11
        return functional.linear(self.mix(self.norm(self.embed(tokens))), self.embed.weight).sum(2)


class Shown(nn.Module):
    """A token is put before the others of each sample, and positions are added."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.randn(1, 1, 6))
        self.position = nn.Parameter(torch.randn(1, 3, 6))
        self.first, self.out = nn.Linear(6, 6), nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        tokens = torch.cat([self.token.expand(len(x), -1, -1), x.view(len(x), 2, 6)], 1)
        return self.out(self.first(tokens + self.position).relu()).mean(1)


class Twice(nn.Module):
    """Calls one module twice, and changes an output in place."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.out = nn.Linear(12, 12), nn.Linear(12, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.relu_(self.inner(torch.relu_(self.inner(x)))))


class Before(nn.Linear):
    """Changes what it was given after it used it, and what it gives."""

    def forward(self, x: Tensor) -> Tensor:
        x = x.clone()
        made = functional.linear(x, self.weight, self.bias)
        return made.mul_(0.5) if self.in_features % 2 else made


def images() -> nn.Module:
    return nn.Sequential(
        *(nn.Unflatten(1, (1, 3, 4)), nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4)),
        *(nn.ReLU(inplace=True), nn.Conv2d(4, 4, 3, groups=4, padding=1), nn.GroupNorm(2, 4)),
        *(nn.Flatten(), nn.Linear(48, 4)),
    )


class Attends(nn.Module):
    """torch's own attention, and a recurrent layer."""

    def __init__(self) -> None:
        super().__init__()
        self.attend = nn.MultiheadAttention(6, 2, batch_first=True)
        self.recur, self.out = nn.GRU(6, 5, batch_first=True), nn.Linear(5, 4)

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.view(len(x), 2, 6)
        attended = self.attend(tokens, tokens, tokens, need_weights=False)[0]
        return self.out(self.recur(attended)[0].mean(1))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "mlp": lambda: nn.Sequential(nn.Linear(12, 9), nn.Tanh(), nn.Linear(9, 4)),
    "images": images,
    "tied": Tied,
    "shown": Shown,
    "twice": Twice,
    "attends": Attends,
    "changes what it has": lambda: nn.Sequential(Before(12, 13), Before(13, 4)),
    "weight norm": lambda: nn.Sequential(
        parametrizations.weight_norm(nn.Linear(12, 9)), nn.Tanh(), nn.Linear(9, 4)
    ),
    "spectral norm": lambda: nn.Sequential(
        parametrizations.spectral_norm(nn.Linear(12, 9)), nn.Tanh(), nn.Linear(9, 4)
    ),
}


def run(
    build: Callable[[], nn.Module], steps: int, before: Step = lambda number, model: None
) -> list[StepReport]:
    """Reports of every step."""
    torch.manual_seed(0)
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with Monitor(model, optimizer, every_n_steps=1, on_error="raise", seed=3) as monitor:
        for number in range(steps):
            before(number, model)
            held = {id(p) for group in optimizer.param_groups for p in group["params"]}
            if new := [p for p in model.parameters() if id(p) not in held]:
                optimizer.add_param_group({"params": new})
            optimizer.zero_grad()
            model(torch.randn(7, 12)).square().mean().backward()
            optimizer.step()
        monitor.complete_report()
    return [*monitor.reports]


@pytest.fixture
def always_whole(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    return lambda: monkeypatch.setattr(trace, "_EVERY", 1)


@pytest.mark.parametrize("name", MODELS)
def test_plain_hooks_read_what_a_watch_of_all_functions_reads(
    name: str, always_whole: Callable[[], None]
) -> None:
    plain = run(MODELS[name], 6)
    always_whole()
    watched = run(MODELS[name], 6)
    assert [r.layers.keys() for r in plain] == [r.layers.keys() for r in watched]
    for one, other in zip(plain, watched, strict=True):
        assert one.coverage == other.coverage == 1
        assert one.notes == other.notes
        assert {p: repr(x) for p, x in one.layers.items()} == {
            p: repr(x) for p, x in other.layers.items()
        }


def test_functions_of_plain_modules_are_not_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    original = trace.Trace.plan

    def plan(self: trace.Trace, *args: object) -> trace.Plan | None:
        made = original(self, *args)  # type: ignore[arg-type]
        seen.append(-1 if made is None else len(made.watched))
        return made

    monkeypatch.setattr(trace.Trace, "plan", plan)
    run(images, 20)
    assert seen[:6] == [-1, -1, 0, 0, 0, 0]  # the first steps see all functions
    assert [step for step, watched in enumerate(seen) if watched < 0] == [0, 1, 16]
