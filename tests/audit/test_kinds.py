"""Questions about losses and data: what each finds, and what comes near to it."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from audited import batches, seen
from made_records import record
from torch import Tensor, nn
from torch.nn import functional
from trial_setups import answer, loss, mlp, setup

from adiv_monitor.audit.experiments.loss_inputs import activated_output
from adiv_monitor.diagnosis import diagnose
from adiv_monitor.diagnosis.faults import FAULTS
from adiv_monitor.diagnosis.finding import Finding
from adiv_monitor.diagnosis.record import Probed, Record, Wiring

GENERATOR = torch.Generator().manual_seed(0)


def found(name: str, of: Any) -> list[Finding]:
    """Return the findings that the facts of one question show."""
    answered = answer(name, of, of.fork())
    assert not answered.untold
    facts: Record = seen(nn.Linear(6, 3), steps=2)
    record = Record(facts.facts, (), (), (), probed={name: Probed(answered.facts)})
    assert name in FAULTS
    return [finding for finding in diagnose(record) if finding.name == name]


class Coded(nn.Module):
    """An autoencoder with a code of mean and spread."""

    def __init__(self, draw: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.encoder, self.decoder, self.draw = nn.Linear(12, 4), nn.Linear(2, 12), draw

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        mean, spread = self.encoder(x).chunk(2, 1)
        return self.decoder(self.draw(mean, spread.exp())), mean


def coded(model: nn.Module, batch: Any) -> Tensor:
    made, mean = model(batch[0])
    return functional.mse_loss(made, batch[0]) + 0.01 * mean.square().mean()


@pytest.mark.parametrize(
    ("draw", "hits"),
    [
        (torch.normal, True),
        (lambda m, s: torch.distributions.Normal(m, s).sample(), True),
        (lambda m, s: torch.distributions.Normal(m, s).rsample(), False),
        (lambda m, s: m + s * torch.normal(torch.zeros_like(m)), False),
    ],
)
def test_a_sample_without_a_path_cuts_the_gradient(draw: Any, hits: bool) -> None:
    said = found("gradient-cut", setup(model=Coded(draw), loss=coded))
    assert bool(said) is hits
    assert not hits or "rsample" in said[0].advice[0].text


class Weighed(nn.Module):
    def __init__(self, axis: int) -> None:
        super().__init__()
        self.score, self.head, self.axis = nn.Linear(4, 1), nn.Linear(4, 3), axis

    def forward(self, x: Tensor) -> Tensor:
        x = x.view(len(x), 3, 4)
        return self.head((self.score(x).softmax(self.axis) * x).sum(1))


@pytest.mark.parametrize(("axis", "hits"), [(-1, True), (1, False)])
def test_weights_of_a_single_score(axis: int, hits: bool) -> None:
    assert bool(found("softmax-of-one", setup(model=Weighed(axis)))) is hits


def test_the_function_whose_gradient_is_not_a_number_is_named_with_its_line() -> None:
    def rooted(model: nn.Module, batch: Any) -> Tensor:
        return (0 * model(batch[0])).sqrt().mul(0).sum()

    record = seen(nn.Linear(6, 3), batches(), loss=rooted, steps=2)
    assert (record.first_non_finite or "").startswith("gradient of sqrt (test_kinds.py:")


def of_counts(log_input: bool) -> Callable[[nn.Module, Any], Tensor]:
    def counted(model: nn.Module, batch: Any) -> Tensor:
        made = model(batch[0])[:, 0]
        return functional.poisson_nll_loss(made, batch[1].float(), log_input=log_input)

    return counted


class Exponential(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.exp()


@pytest.mark.parametrize("last", [Exponential(), nn.Softplus(), nn.Identity()])
@pytest.mark.parametrize("log_input", [True, False])
def test_an_exponential_that_is_taken_twice(last: nn.Module, log_input: bool) -> None:
    of = setup(model=nn.Sequential(mlp(), last), loss=of_counts(log_input))
    twice = activated_output(of.fork()) is not None
    assert twice is (log_input and not isinstance(last, nn.Identity))


def difference(discount: float, cut: bool) -> Callable[[nn.Module, Any], Tensor]:
    def of_times(model: nn.Module, batch: Any) -> Tensor:
        x, ends = batch[0], batch[1] == 0
        then = discount * model(x.roll(1, 0)).amax(1) * ends
        then = x[:, 0] + (then.detach() if cut else then)
        return functional.smooth_l1_loss(model(x).gather(1, batch[1][:, None])[:, 0], then)

    return of_times


@pytest.mark.parametrize(
    ("discount", "cut", "hits"), [(0.9, False, True), (0.9, True, False), (1.0, False, False)]
)
def test_a_target_that_passes_gradients_on(discount: float, cut: bool, hits: bool) -> None:
    assert bool(found("target-attached", setup(loss=difference(discount, cut)))) is hits


def shrinking(by: float, of_outputs: bool) -> Callable[[nn.Module, Any], Tensor]:
    def penalised(model: nn.Module, batch: Any) -> Tensor:
        made = model(batch[0])
        shrunk = [made] if of_outputs else [p for p in model.parameters() if p.ndim > 1]
        return functional.cross_entropy(made, batch[1]) + by * sum(x.abs().sum() for x in shrunk)

    return penalised


@pytest.mark.parametrize(
    ("by", "of_outputs", "hits"), [(0.1, False, True), (1e-4, False, False), (0.1, True, False)]
)
def test_a_penalty_on_the_weights_in_the_loss(by: float, of_outputs: bool, hits: bool) -> None:
    assert bool(found("decay-fights", setup(loss=shrinking(by, of_outputs)))) is hits


def at_the_ends(model: nn.Module, batch: Any) -> Tensor:
    """Boundary values: outputs that are asked for at the same inputs in each step."""
    return loss(model, batch) + 9 * model(torch.eye(12)[:2]).square().sum()


class Tempered(nn.Module):
    """An actor and a critic, with the logarithm of a temperature that begins at 0."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.actor, self.critic = mlp(), mlp()
        self.heat = nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.actor(x), self.critic(x)


def soft_actor_critic(model: Any, batch: Any) -> Tensor:
    logits, value = model(batch[0])
    p, log = logits.softmax(1), logits.log_softmax(1)
    entropy, heat = -(p * log).sum(1), model.heat.exp().detach()
    of_actor = (p * (heat * log - value.detach())).sum(1).mean()
    of_heat = (model.heat * (entropy - 0.5).detach()).mean()
    of_critic = functional.mse_loss(value.gather(1, batch[1][:, None]), batch[0][:, :1])
    return of_critic + of_actor + of_heat


def test_what_is_computed_at_fixed_inputs_is_no_penalty_on_the_weights() -> None:
    assert not found("decay-fights", setup(loss=at_the_ends))
    assert not found("decay-fights", setup(model=Tempered(), loss=soft_actor_critic))


def test_a_detached_factor_of_a_term_is_no_cut() -> None:
    assert not found("gradient-cut", setup(model=Tempered(), loss=soft_actor_critic))


class Multiplied(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 0


def test_a_module_that_loses_the_inputs_is_named() -> None:
    of = setup(model=nn.Sequential(Multiplied(), mlp()))
    lost = answer("outputs-constant", of, of.fork())
    (said,) = diagnose(replace(record(wiring=Wiring(input_matters=0.0)),
                               probed={"outputs-constant": lost}))  # fmt: skip
    assert said.name == "input-ignored" and "Multiplied '0'" in said.summary
