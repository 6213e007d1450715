"""What is asked about the loss: each bug is named where it is planted, its healthy kin are not."""

import copy
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from computes import Computes
from torch import Tensor, nn
from torch.distributions import Categorical
from torch.nn import functional as F
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

from adiv_monitor.audit.experiments.loss_inputs import activated_output
from adiv_monitor.audit.experiments.observe import observe
from adiv_monitor.audit.training.setup import Setup
from adiv_monitor.diagnosis import diagnose
from adiv_monitor.diagnosis.faults.loss import AGAINST
from adiv_monitor.diagnosis.record import ActivatedOutput, Fact

HERE = "test_probes_of_losses.py:"
OfPair = Callable[[Any, Tensor], Tensor]
Target = Callable[[Tensor, Tensor], Tensor]


def classes(x: Tensor, y: Tensor) -> Tensor:
    return y


def one_hot(x: Tensor, y: Tensor) -> Tensor:
    return F.one_hot(y, 3).float()


def several(x: Tensor, y: Tensor) -> Tensor:
    """Any number of three classes."""
    return (x[:, :3] > 0).float()


def values(x: Tensor, y: Tensor) -> Tensor:
    """Targets of three outputs, between −6 and 6."""
    return 6 * x[:, :3].sin()


def inputs(x: Tensor, y: Tensor) -> Tensor:
    return x[:, :3].contiguous()


def compared(
    of: OfPair, target: Target = classes, make: Callable[[], nn.Module] = mlp
) -> Callable[[], Setup]:
    """A setup whose loss compares the outputs with targets of inputs and classes."""
    made = tuple((x, target(x, y)) for x, y in batches())
    return lambda: setup(batches=made, loss=of_outputs(of), model=make())


def with_loss(of: Callable[[Any, Any], Tensor], **changes: Any) -> Callable[[], Setup]:
    return lambda: setup(loss=of, **changes)


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=0.03)


# Targets that the outputs can't reach, and logits in place of probabilities


def reached(change: Callable[[Tensor], Tensor]) -> Callable[[], Setup]:
    return compared(lambda z, y: F.mse_loss(change(z), y), values)


def as_mask(x: Tensor, y: Tensor) -> Tensor:
    """A mask as it is read from a file: 0 and 255."""
    return 255.0 * (x[:, :3] > 0)


def unknown(x: Tensor, y: Tensor) -> Tensor:
    return several(x, y).masked_fill(x[:, 3:6] > 0.5, -1.0)


def of_known(z: Tensor, y: Tensor) -> Tensor:
    return F.binary_cross_entropy_with_logits(z, y, reduction="none")[y >= 0].mean()


def shares_of(z: Tensor, y: Tensor) -> Tensor:
    return F.binary_cross_entropy(z.softmax(1), y)


def dice(p: Tensor, y: Tensor) -> Tensor:
    return 1 - (2 * (p * y).sum() + 1) / (p.sum() + y.sum() + 1)


def of_classes(of: OfPair) -> OfPair:
    return lambda z, y: of(z, F.one_hot(y, 3))


def close_to_a_pole(z: Tensor, y: Tensor) -> Tensor:
    return dice(z - z.mean() - (y.sum() + 0.9) / z.numel() if z.requires_grad else z, y)


BCE, IN_RANGE = F.binary_cross_entropy_with_logits, "lie between -1 and 1"
RANGES: list[Row] = [
    ("targets-out-of-range", "tanh", reached(lambda z: z.tanh().flatten().view(-1, 3)), IN_RANGE),
    ("targets-out-of-range", "clamp", reached(lambda z: z.clamp(-1, 1)), IN_RANGE),
    ("targets-out-of-range", "a sigmoid, moved", reached(lambda z: 1 - 2 * z.sigmoid()), IN_RANGE),
    ("targets-out-of-range", "7 tanh", reached(lambda z: 7 * z.tanh()), ""),
    ("targets-out-of-range", "9 tanh in place", reached(lambda z: (z.tanh() + 0).mul_(9.0)), ""),
    ("targets-out-of-range", "a ReLU, moved", reached(lambda z: z.relu() - 8), ""),
    ("targets-out-of-range", "nearly all", reached(lambda z: z.clamp(-5.9, 5.9)), ""),
    ("targets-out-of-range", "a mask of 255", compared(BCE, as_mask), "(such as 255)"),
    ("targets-out-of-range", "a mask of 1", compared(BCE, lambda x, y: as_mask(x, y) / 255), ""),
    ("targets-out-of-range", "a Dice with a mask of 255",
     compared(lambda z, y: dice(z.sigmoid(), y), as_mask), "because of sigmoid"),
    ("targets-out-of-range", "a Dice with a mask of 1",
     compared(lambda z, y: dice(z.sigmoid(), y), several), ""),
    ("targets-out-of-range", "rewards of shares",
     compared(lambda z, y: -(z.softmax(1) * y).sum(1).mean(), values), ""),
    ("targets-out-of-range", "unknown ones", compared(BCE, unknown), "(such as -1)"),
    ("targets-out-of-range", "unknown ones left out", compared(of_known, unknown), ""),
    ("targets-out-of-range", "several classes", compared(shares_of, several), "act: The targets"),
    ("targets-out-of-range", "several, by cross-entropy", compared(F.cross_entropy, several),
     "watch: The targets"),
    ("targets-out-of-range", "one class", compared(shares_of, one_hot), ""),
    ("targets-out-of-range", "one, by cross-entropy", compared(F.cross_entropy, one_hot), ""),
    ("targets-out-of-range", "sigmoids of several", compared(BCE, several), ""),
    ("targets-out-of-range", "one of a softmax",
     compared(lambda z, y: F.mse_loss(z.softmax(1)[:, 0], y[:, 0]), several), ""),
    ("targets-out-of-range", "a likelihood of counts",
     compared(lambda z, y: -(y * z.log_softmax(1)).sum(1).mean(), several), ""),
    ("logits-as-probabilities", "a Dice loss", compared(dice, several), "exceed 0 to 1"),
    ("logits-as-probabilities", "of sigmoids",
     compared(lambda z, y: dice(z.sigmoid(), y), several), ""),
    ("logits-as-probabilities", "of one class", compared(of_classes(dice)), "exceed 0 to 1"),
    ("logits-as-probabilities", "of a softmax",
     compared(of_classes(lambda z, y: dice(z.softmax(1), y))), ""),
    ("logits-as-probabilities", "close to a pole", compared(close_to_a_pole, several), "exceed"),
    ("logits-as-probabilities", "a cross-entropy", compared(BCE, several), ""),
    ("logits-as-probabilities", "a squared error", compared(F.mse_loss, several), ""),
    ("logits-as-probabilities", "clamped", compared(lambda z, y: dice(z.clamp(0, 1), y), several),
     ""),
    ("logits-as-probabilities", "cosines",
     compared(lambda z, y: 1 - F.cosine_similarity(z, y + 1e-3).mean(), several), ""),
    ("logits-as-probabilities", "NaN at the targets",
     compared(lambda z, y: -(y * (y - z).log()).sum(), several), ""),
]  # fmt: skip


# Samples, places and pairs


def over_time(targets: Callable[[Tensor], Tensor]) -> Setup:
    """A recurrent network that returns time first, (T, B, classes)."""

    def by_time(model: nn.Module, x: Tensor) -> Tensor:
        return model.head(model.gru(x.transpose(0, 1))[0])

    made = tuple((torch.randn(6, 5, 4), torch.randint(3, (6, 5))) for _ in range(4))
    of = of_outputs(lambda z, y: F.cross_entropy(z.flatten(0, 1), targets(y).flatten()))
    model = Computes(by_time, gru=nn.GRU(4, 8), head=nn.Linear(8, 3))
    return setup(model=model, batches=made, loss=of)


def cut_off() -> nn.Module:
    """Ends in a ReLU, which leaves outputs that inputs change to one of three classes."""
    model = mlp()
    model[-1].bias.data = torch.tensor([-99.0, -99.0, 3.0])
    return nn.Sequential(model, nn.ReLU())


def one_value(of: OfPair) -> Callable[[], Setup]:
    make = lambda: nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 1))  # noqa: E731
    return compared(of, lambda x, y: 2.0 * (y % 2) - 1, make)


def of_actions(model: nn.Module, batch: Any) -> Tensor:
    return F.mse_loss(model(batch[0])[:, batch[1]], batch[0][:, 0])


def margin(z: Tensor, y: Tensor) -> Tensor:
    return (1 - z * y).relu().mean()


def ranking(z: Tensor, y: Tensor) -> Tensor:
    """Return a ranking loss of all pairs of samples."""
    above = (y[:, None] > y).float()
    return (F.softplus(z.T - z) * above).mean()


def over_places(change: Callable[[Tensor], Tensor]) -> Setup:
    """Four places and four classes, which a cross-entropy expects along axis 1."""
    of = of_outputs(lambda z, y: F.cross_entropy(change(z), y))
    made = ((torch.randn(8, 4, 5), torch.randint(4, (8, 4))),)
    return setup(model=nn.Linear(5, 4), batches=made, loss=of)


def given(of: Callable[..., Tensor], change: Callable[[Tensor], Tensor]) -> Callable[[], Setup]:
    return compared(lambda z, y: of(change(z), y))


def of_axis(axis: int) -> Callable[[], Setup]:
    """Log-probabilities (B, 3, 4) of places, along an axis; the classes are along axis 1."""
    change = lambda z: z[..., None].expand(-1, -1, 4).log_softmax(axis)  # noqa: E731
    return compared(lambda z, y: F.nll_loss(change(z), y[:, None].expand(-1, 4)))


def ctc(axis: int = 2, first: int = 1, blank: int = 0) -> Setup:
    """Four labels of nine places of six scores, with padding."""

    def of(model: nn.Module, batch: Any) -> Tensor:
        scores = (model(batch[0])[:, None].expand(-1, 9, 6) + torch.eye(9, 6)).transpose(0, 1)
        labels = F.pad(first + torch.arange(4).expand(len(batch[0]), 4), (0, 3), value=blank)
        size = torch.full((len(batch[0]),), 9), torch.full((len(batch[0]),), 4)
        return F.ctc_loss(scores.log_softmax(axis), labels, *size, blank=blank)

    return setup(loss=of, model=nn.Linear(12, 6))


NO_LOG, OTHER = "receives probabilities", "another axis than that of the classes"
SAMPLES: list[Row] = [
    ("targets-misplaced", "time first", lambda: over_time(lambda y: y), "act: The outputs"),
    ("targets-misplaced", "both transposed", lambda: over_time(lambda y: y.t()), ""),
    ("targets-misplaced", "a ReLU on the logits", compared(F.cross_entropy, make=cut_off),
     "untold: inputs or"),
    ("targets-misplaced", "over the samples",
     compared(lambda z, y: F.nll_loss(z.log_softmax(0), y)), "untold: inputs or"),
    ("targets-misplaced", "pairs",
     compared(lambda z, y: (torch.cdist(z, z) * (y[:, None] == y)).mean()), "untold: inputs or"),
    ("broadcast-loss", "a margin", one_value(margin), "shapes (32, 1) and (32,)"),
    ("broadcast-loss", "one index", lambda: setup(loss=of_actions), "shapes (32, 32) and (32,)"),
    ("broadcast-loss", "one axis", one_value(lambda z, y: margin(z[:, 0], y)), ""),
    ("broadcast-loss", "a ranking", one_value(ranking), ""),
    ("broadcast-loss", "ones",
     one_value(lambda z, y: (z.expand(-1, 4) * torch.ones(4)).square().mean()), ""),
    ("broadcast-loss", "an accuracy", one_value(
        lambda z, y: z.square().mean() + 0 * ((z > 0) == (y > 0)).float().mean()), ""),
    ("broadcast-loss", "a matrix",
     one_value(lambda z, y: (torch.ones(32, 32) @ z[:, 0]).square().mean()), ""),
    ("softmax-over-samples", "places", lambda: over_places(lambda z: z), "runs over the places"),
    ("softmax-over-samples", "classes", lambda: over_places(lambda z: z.mT), ""),
    ("no-log", "logits", given(F.nll_loss, lambda z: z), "receives logits"),
    ("no-log", "small logits", given(F.nll_loss, lambda z: z / 10), "receives logits"),
    ("no-log", "probabilities", given(F.nll_loss, lambda z: z.softmax(1)), NO_LOG),
    ("no-log", "their logarithms", given(F.nll_loss, lambda z: z.log_softmax(1)), ""),
    ("no-log", "of 16 bits", given(F.nll_loss, lambda z: z.half().log_softmax(1).float()), ""),
    ("no-log", "over the samples", given(F.nll_loss, lambda z: z.log_softmax(0)), ""),
    ("no-log", "a class masked", given(F.nll_loss, lambda z: z.masked_fill(
        torch.arange(3) == 2, -torch.inf).log_softmax(1).clamp(min=-1e9)), ""),
    ("no-log", "over places", of_axis(2), OTHER),
    ("no-log", "over classes", of_axis(1), ""),
    ("no-log", "over samples", of_axis(0), OTHER),
    ("no-log", "over labels", lambda: ctc(2), ""),
    ("no-log", "over lines", lambda: ctc(1), OTHER),
    ("no-log", "over time", lambda: ctc(0), OTHER),
    ("label-is-blank", "from 0", lambda: ctc(first=0), "act: 25% of the labels"),
    ("label-is-blank", "a blank of its own", lambda: ctc(first=0, blank=5), ""),
    ("label-is-blank", "the last one", lambda: ctc(first=2, blank=5), "act: 25% of the labels"),
    ("label-is-blank", "from 1", ctc, ""),
]  # fmt: skip


# Losses that reward what contradicts the targets


def contrastive(d: Tensor, same: Tensor) -> Tensor:
    return (same * d.square() + (1 - same) * (1 - d).relu().square()).mean()


def actor_and_critic() -> nn.Module:
    """Gives logits of actions and an estimate of the reward."""
    torch.manual_seed(1)
    parts = {"actor": nn.Linear(12, 3), "critic": nn.Linear(12, 1)}
    return Computes(lambda m, x: (m.actor(x), m.critic(x)[:, 0]), **parts)


def sampled(given: tuple[Tensor, Tensor], y: Tensor, sign: int) -> Tensor:
    """The loss of A2C: actions are drawn, and rewarded if they are the class.

    Its value is higher for right outputs at either sign, and its gradient right at one.
    """
    z, value = given
    policy = torch.distributions.Categorical(logits=z)
    action = policy.sample()
    reward = (action == y).float()
    of_policy = -(policy.log_prob(action) * (reward - value).detach()).mean()
    return sign * of_policy + (reward - value).square().mean()


def surrogate(sign: int) -> Callable[[], Setup]:
    return compared(partial(sampled, sign=sign), make=actor_and_critic)


def cosine(z: Tensor, y: Tensor) -> Tensor:
    return F.cosine_similarity(z, y).mean()


def distances() -> nn.Module:
    return nn.Sequential(nn.Linear(12, 3), nn.Softplus())


REVERSED: list[Row] = [
    ("loss-reversed", "1 − Dice", compared(lambda z, y: 1 - dice(z.sigmoid(), y), several), "act"),
    ("loss-reversed", "a minus", compared(lambda z, y: -BCE(z, y), several), "act"),
    ("loss-reversed", "1 − y", compared(lambda z, y: F.mse_loss(z.sigmoid(), 1 - y), several),
     "act"),
    ("loss-reversed", "a minus, of classes", compared(lambda z, y: -F.cross_entropy(z, y)), "act"),
    ("loss-reversed", "distances", compared(contrastive, several, distances), "watch"),
    ("loss-reversed", "a likeness", compared(cosine, inputs), "act"),
    ("loss-reversed", "a surrogate with a minus", surrogate(-1), " "),
    ("loss-reversed", "a surrogate", surrogate(1), ""),
    ("loss-reversed", "1 − likeness", compared(lambda z, y: 1 - cosine(z, y), inputs), ""),
    ("loss-reversed", "moved", compared(lambda z, y: F.mse_loss(z + 2, 3 * y), inputs), ""),
    ("loss-reversed", "a critic, which may call the real ones -1",
     compared(lambda z, y: (z * y).mean(), lambda x, y: x[:, :3].sign()), ""),
    ("loss-reversed", "a squared error", compared(F.mse_loss, several), ""),
    ("loss-reversed", "Dice", compared(dice, several), ""),
    ("loss-reversed", "a hinge", compared(lambda z, y: margin(z, 2 * y - 1), several), ""),
    ("loss-reversed", "no targets", compared(lambda z, y: z.square().mean(), several), ""),
    ("loss-reversed", "a cross-entropy", compared(F.cross_entropy), ""),
]  # fmt: skip


# Gradients of the loss


def taught() -> nn.Module:
    """A student, which begins as a copy of its teacher."""
    torch.manual_seed(1)
    student = nn.Linear(12, 3)
    parts = {"student": student, "teacher": copy.deepcopy(student).requires_grad_(False)}
    return Computes(lambda m, x: (m.student(x), m.teacher(x)), **parts)


def distilled(z: tuple[Tensor, Tensor], y: Tensor, right: bool) -> Tensor:
    student, teacher = z
    given = (student if right else teacher).log_softmax(1)
    soft = F.kl_div(given, teacher.softmax(1), reduction="batchmean")
    return soft + 0.1 * F.cross_entropy(student, y)


def quantised(z: Tensor, y: Tensor) -> Tensor:
    """Stopped targets of other features are compared with others."""
    q = z + (z.round() - z).detach()
    return F.mse_loss(q, z.detach()) + F.cross_entropy(q, y)


def ratio(z: Tensor, y: Tensor, cut: bool) -> Tensor:
    logits = z.log_softmax(1).gather(1, y[:, None])
    return -(logits - (logits.detach() if cut else logits)).exp().mean()


def itself(z: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(z, z.detach())


def satisfied(z: Tensor, y: Tensor) -> Tensor:
    return (z.square().mean() - 1e4).relu()


def after(change: Callable[[Tensor], Tensor]) -> Callable[[], Setup]:
    return compared(lambda z, y: (change(z) - F.one_hot(y, 3)).square().mean())


def difference(discount: float, cut: bool) -> Callable[[], Setup]:
    def of_times(model: nn.Module, batch: Any) -> Tensor:
        x, ends = batch[0], batch[1] == 0
        then = discount * model(x.roll(1, 0)).amax(1) * ends
        then = x[:, 0] + (then.detach() if cut else then)
        return F.smooth_l1_loss(model(x).gather(1, batch[1][:, None])[:, 0], then)

    return with_loss(of_times)


def size(model: nn.Module) -> Tensor:
    return torch.stack([p.square().mean() for p in model.parameters()]).sum()


def shrinking(by: float, outputs: bool = False) -> Callable[[], Setup]:
    def penalised(model: nn.Module, batch: Any) -> Tensor:
        made = model(batch[0])
        shrunk = [made] if outputs else [p for p in model.parameters() if p.ndim > 1]
        return F.cross_entropy(made, batch[1]) + by * sum(x.abs().sum() for x in shrunk)

    return with_loss(penalised)


def at_the_ends(model: nn.Module, batch: Any) -> Tensor:
    """Boundary values: outputs that are asked for at the same inputs in each step."""
    return loss(model, batch) + 9 * model(torch.eye(12)[:2]).square().sum()


def soft_actor_critic(model: Any, batch: Any) -> Tensor:
    logits, value = model(batch[0])
    p, log = logits.softmax(1), logits.log_softmax(1)
    entropy, heat = -(p * log).sum(1), model.heat.exp().detach()
    of_actor = (p * (heat * log - value.detach())).sum(1).mean()
    of_heat = (model.heat * (entropy - 0.5).detach()).mean()
    of_critic = F.mse_loss(value.gather(1, batch[1][:, None]), batch[0][:, :1])
    return of_critic + of_actor + of_heat


def tempered() -> Setup:
    """An actor and a critic, with the logarithm of a temperature that begins at 0."""
    parts = {"actor": mlp(), "critic": mlp(), "heat": nn.Parameter(torch.zeros(()))}
    model = Computes(lambda m, x: (m.actor(x), m.critic(x)), **parts)
    return setup(model=model, loss=soft_actor_critic)


def slope(model: nn.Module, batch: Any, graph: bool) -> Tensor:
    x = batch[0].clone().requires_grad_()
    (g,) = torch.autograd.grad(model(x).sum(), x, create_graph=graph)
    return (g.norm(dim=1) - 1).square().mean()


def accumulated(model: nn.Module, batch: Any) -> Tensor:
    total = loss(model, batch)
    total += 0.1 * size(model).detach()
    return total / 2


def real(logits: Tensor, label: float) -> Tensor:
    return BCE(logits, torch.full_like(logits, label))


def players(joint: bool) -> Callable[[], Setup]:
    """Both players' losses in one, where each trains its own player or both."""

    def of(model: Any, batch: Any) -> Tensor:
        made = model(torch.randn(len(batch[0]), 4))
        fixed = {name: p.detach() for name, p in model.told.named_parameters()}
        own = model.told(made) if joint else torch.func.functional_call(model.told, fixed, (made,))
        other = model.told(made if joint else made.detach())
        return real(model.told(batch[0]), 1.0) + real(other, 0.0) + real(own, 1.0)

    torch.manual_seed(0)
    made = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 12))
    told = nn.Sequential(nn.Linear(12, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1))
    return with_loss(of, model=Computes(lambda m, z: m.made(z), made=made, told=told))


def critic(model: nn.Module, batch: Any) -> Tensor:
    return model(torch.randn_like(batch[0])).mean() - model(batch[0]).mean()


GRADIENTS: list[Row] = [
    ("zero-gradient", "itself", compared(itself), f"mse_loss ({HERE}"),
    ("zero-gradient", "a satisfied margin", compared(satisfied), ""),
    ("zero-gradient", "stopped targets", compared(quantised), ""),
    ("zero-gradient", "a ratio of itself", compared(partial(ratio, cut=False)), "with itself"),
    ("zero-gradient", "a ratio of stored ones", compared(partial(ratio, cut=True)), ""),
    ("zero-gradient", "the teacher itself",
     compared(partial(distilled, right=False), make=taught), "with itself"),
    ("zero-gradient", "the student", compared(partial(distilled, right=True), make=taught), ""),
    ("zero-slope", "round", after(torch.round), "round"),
    ("zero-slope", "sign", after(lambda z: torch.sign(z.tanh())), "sign"),
    ("zero-slope", "straight-through", after(lambda z: z + (z.round() - z).detach()), ""),
    ("zero-slope", "tanh", after(torch.tanh), ""),
    ("zero-slope", "a factor", after(lambda z: z.sign() * z.abs().log1p()), ""),
    ("zero-slope", "clamp", after(lambda z: z.clamp(0, 1)), ""),
    ("target-attached", "the next value", difference(0.9, cut=False), "0.9"),
    ("target-attached", "cut", difference(0.9, cut=True), ""),
    ("target-attached", "no discount", difference(1.0, cut=False), ""),
    ("decay-fights", "a penalty", shrinking(0.1), "weights alone"),
    ("decay-fights", "a small one", shrinking(1e-4), ""),
    ("decay-fights", "of the outputs", shrinking(0.1, outputs=True), ""),
    ("decay-fights", "boundary values", with_loss(at_the_ends), ""),
    ("decay-fights", "a temperature", tempered, ""),
    ("gradient-cut", "a detached factor", tempered, ""),
    ("term-without-graph", "no create_graph",
     with_loss(lambda m, b: loss(m, b) + 10 * slope(m, b, graph=False)), HERE),
    ("term-without-graph", "item()", with_loss(lambda m, b: loss(m, b) - size(m).item()), HERE),
    ("term-without-graph", "in place", with_loss(accumulated), HERE),
    ("term-without-graph", "one term", with_loss(loss), ""),
    ("term-without-graph", "a graph",
     with_loss(lambda m, b: loss(m, b) + 10 * slope(m, b, graph=True)), ""),
    ("term-without-graph", "constants",
     with_loss(lambda m, b: loss(m, b) + 3.0 + b[0].square().mean()), ""),
    ("term-without-graph", "straight-through",
     with_loss(lambda m, b: loss(m, b).detach() + size(m) - size(m).detach()), ""),
    ("terms-opposed", "two players in one", players(joint=True), "opposed"),
    ("terms-opposed", "a term and 2 less it",
     with_loss(lambda m, b: loss(m, b) + (2 - loss(m, b))), "the cosine of their gradients is -1"),
]  # fmt: skip


# Outputs of free choice, and losses that lower themselves


def contrast(model: nn.Module, batch: Any, scale: float) -> Tensor:
    views = [F.normalize(model(batch[0] + d), dim=1) for d in (0.0, 0.1)]
    return F.cross_entropy(scale * views[0] @ views[1].T, torch.arange(len(batch[0])))


def smooth_dice(z: Tensor, y: Tensor, smooth: float) -> Tensor:
    p, t = z.softmax(1), F.one_hot(y, 3)
    both, every = (p * t).sum(0), (p + t).sum(0)
    return (1 - (2 * both + smooth) / (every + smooth)).mean()


def bounded(model: nn.Module, batch: Any, mean: float) -> Tensor:
    return F.mse_loss(2 * model(batch[0])[:, 0].tanh(), mean + batch[0][:, 0].tanh())


def with_queue() -> nn.Module:
    torch.manual_seed(0)
    parts = {"layer": nn.Linear(12, 8), "queue": nn.Buffer(F.normalize(torch.randn(16, 8), dim=1))}
    return Computes(lambda m, x: F.normalize(m.layer(x), dim=1), **parts)


def queued(model: Any, batch: Any) -> Tensor:
    """A queue that the loss fills, which begins anew each time."""
    query, key = model(batch[0]), F.normalize(batch[0][:, :8], dim=1)
    before = model.queue.clone()
    model.queue[: len(key)] = key[:16]
    logits = torch.cat([(query * key).sum(1, keepdim=True), query @ before.T], 1)
    return F.cross_entropy(logits / 0.1, torch.zeros(len(query), dtype=torch.long))


def balanced(joined: Callable[[Tensor, Tensor], Tensor]) -> Callable[[], Setup]:
    def of(model: Any, batch: Any) -> Tensor:
        logits, value = model(batch[0])
        wanted = batch[0].mean(1, keepdim=True)
        terms = [F.cross_entropy(logits, batch[1]), F.mse_loss(value, wanted)]
        return joined(model.weights, torch.stack(terms))

    torch.manual_seed(1)
    heads = nn.ModuleList([nn.Linear(12, 3), nn.Linear(12, 1)])
    parts = {"heads": heads, "weights": nn.Parameter(torch.zeros(2))}
    return with_loss(of, model=Computes(lambda m, x: [head(x) for head in m.heads], **parts))


def beside() -> Setup:
    """Factors beside the last layer, which are no weights of terms."""
    parts = {"layer": nn.Linear(12, 3), "factor": nn.Parameter(torch.randn(3, 12))}
    model = Computes(lambda m, x: m.layer(x) + x @ m.factor.T, **parts)
    return setup(model=nn.Sequential(model))


def seeds(model: nn.Module, batch: Any) -> Tensor:
    torch.manual_seed(3)
    return loss(model, batch)


def seeds_apart(model: nn.Module, batch: Any) -> Tensor:
    own = torch.randn(12, generator=torch.Generator().manual_seed(3))
    return loss(model, (batch[0] + own, batch[1]))


def restores(model: nn.Module, batch: Any) -> Tensor:
    with torch.random.fork_rng(devices=[]):
        return seeds(model, batch)


def of_shares(z: Tensor, y: Tensor) -> Tensor:
    """A cross-entropy of shares, which are 0 of negative logits: its gradient is NaN or 0."""
    positive = z.relu()
    shares = positive / (positive.sum(1, keepdim=True) + 1e-9)
    return -(F.one_hot(y, 3) * shares.log()).sum(1).mean()


VAIN = "outputs-in-vain"
FREE: list[Row] = [
    (VAIN, "a low scale", with_loss(partial(contrast, scale=0.1)), "does not fall below"),
    (VAIN, "a scale", with_loss(partial(contrast, scale=10.0)), ""),
    (VAIN, "a smoothed Dice", compared(partial(smooth_dice, smooth=1e6)), "does not fall below"),
    (VAIN, "a Dice", compared(partial(smooth_dice, smooth=1.0)), ""),
    (VAIN, "smoothed labels", compared(partial(F.cross_entropy, label_smoothing=0.9)), "not fall"),
    (VAIN, "labels smoothed less", compared(partial(F.cross_entropy, label_smoothing=0.1)), ""),
    (VAIN, "targets far off", with_loss(partial(bounded, mean=40.0)), "does not fall below"),
    (VAIN, "targets", with_loss(partial(bounded, mean=0.0)), ""),
    (
        VAIN,
        "a flat place",
        compared(lambda z, y: ((z - 99).relu() - 1).square().mean()),
        "untold: the loss has no slope",
    ),
    (
        VAIN,
        "a root of zero",
        compared(lambda z, y: (z * 0).square().sum(1).sqrt().mean() + F.cross_entropy(z, y)),
        "untold: the loss has no slope",
    ),
    ("class-untaught", "log(0)", compared(of_shares, make=cut_off), ""),
    (VAIN, "a queue", with_loss(queued, model=with_queue()), ""),
    ("weighs-itself", "exp(-w)", balanced(lambda w, of: (of * torch.exp(-w)).sum()), "falls from"),
    ("weighs-itself", "softplus", balanced(lambda w, of: (of * F.softplus(w)).sum()), "falls from"),
    ("weighs-itself", "held", balanced(lambda w, of: (of * torch.exp(-w) + w).sum()), ""),
    ("weighs-itself", "shares", balanced(lambda w, of: (of * w.softmax(0)).sum()), ""),
    ("weighs-itself", "no weights", balanced(lambda w, of: of.sum()), ""),
    ("weighs-itself", "beside a layer", beside, ""),
    ("seed-again", "in the loss", with_loss(seeds), "a seed is set in each"),
    ("seed-again", "of a generator", with_loss(seeds_apart), ""),
    ("seed-again", "restored", with_loss(restores), ""),
    ("seed-again", "none", with_loss(loss), ""),
]
# Outputs in the place of targets, and statistics that a normalisation forces


def share_of(x: Tensor, y: Tensor) -> Tensor:
    return x[:, :3].sigmoid()


def in_rows(x: Tensor, y: Tensor) -> Tensor:
    """Targets of three places, whose mean differs between samples."""
    return x[:, :3] + 3 * x[:, 3:4]


def centred(x: Tensor, y: Tensor) -> Tensor:
    return F.layer_norm(in_rows(x, y), (3,))


def normed(z: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(F.layer_norm(z, (3,)).tanh(), y)


def images() -> nn.Module:
    layers = nn.Conv2d(1, 2, 3, padding=1), nn.InstanceNorm2d(2), nn.Tanh()
    return nn.Sequential(nn.Unflatten(1, (1, 3, 4)), *layers)


def bright(x: Tensor, y: Tensor) -> Tensor:
    return x.view(-1, 1, 3, 4).expand(-1, 2, 3, 4) + y.view(-1, 1, 1, 1)


EXCHANGED, FORCED = "arguments-exchanged", "outputs-forced"
SIDES: list[Row] = [
    (EXCHANGED, "logits", compared(lambda z, y: BCE(y, z), share_of), f"_with_logits ({HERE}"),
    (EXCHANGED, "classes", compared(lambda z, y: F.cross_entropy(y, z), share_of), "act: cross"),
    (EXCHANGED, "in order", compared(BCE, share_of), ""),
    (EXCHANGED, "both computed", compared(lambda z, y: F.cross_entropy(z, z.softmax(1))), ""),
    (EXCHANGED, "alike", compared(lambda z, y: F.mse_loss(y, z), share_of), ""),
    (FORCED, "rows", compared(normed, in_rows), f"act: layer_norm ({HERE}"),
    (FORCED, "rows of normalised targets", compared(normed, centred), ""),
    (FORCED, "no normalisation", compared(lambda z, y: F.mse_loss(z.tanh(), y), in_rows), ""),
    (FORCED, "images", compared(F.mse_loss, bright, images), "instance_norm in '2'"),
]  # fmt: skip
# Asked of a trained copy, as an audit does.
TRAINED = ("logits-as-probabilities", "loss-reversed", "zero-gradient")
ROWS = [*RANGES, *SAMPLES, *REVERSED, *GRADIENTS, *FREE, *SIDES]


@each_of(ROWS)
def test_a_fault_is_named_and_what_is_like_it_is_not(
    question: str, make: Callable[[], Setup], part: str
) -> None:
    assert_said(question, make(), part, trained=question in TRAINED)


@pytest.mark.parametrize(
    "make",
    [players(joint=False), with_loss(critic), with_loss(lambda m, b: loss(m, b) + 0.1 * size(m))],
    ids=["players", "critic", "penalty"],
)
def test_terms_that_only_pull_apart_are_far_from_opposed(make: Callable[[], Setup]) -> None:
    answered = told("terms-opposed", make())
    assert not answered.untold
    assert all(fact.numbers["largest"] > AGAINST + 0.1 for fact in answered.facts)


def facts_of(name: str, of: Setup) -> tuple[Fact, ...]:
    return told(name, of).facts


def strengths_of(name: str, facts: tuple[Fact, ...]) -> list[str]:
    return [sentence.partition(":")[0] for sentence in said(name, *facts)]


def of_pairs(margin: float, drawn: bool, is_cosine: bool = False) -> Setup:
    """A contrastive loss of neighbours in the order of classes; alike pairs are drawn together."""

    def of(model: nn.Module, batch: Any) -> Tensor:
        order = batch[1].argsort()
        x, y = batch[0][order], batch[1][order]
        a, b = model(x), model(x.roll(5, 0))
        if is_cosine:
            a, b = F.normalize(a, dim=1), F.normalize(b, dim=1)
        distance = ((a - b).square().sum(1) + 1e-9).sqrt()
        together = (y == y.roll(5, 0)) == drawn
        return torch.where(together, distance, (margin - distance).relu()).square().mean()

    apart = tuple((x + 9 * F.pad(one_hot(x, y), (0, 9)), y) for x, y in batches())
    return setup(loss=of, batches=apart)


@pytest.mark.parametrize(("margin", "is_cosine"), [(0.5, False), (9.0, True)])
def test_pairs_that_are_drawn_together_should_be_the_near_ones(
    margin: float, is_cosine: bool
) -> None:
    name = "pairs-reversed"
    (wrong,), (right,) = (facts_of(name, of_pairs(margin, x, is_cosine)) for x in (False, True))
    assert wrong.numbers["share"] < 0.1 and right.numbers["share"] > 0.9
    assert strengths_of(name, (wrong,)) == ["act"] and strengths_of(name, (right,)) == []


@pytest.mark.parametrize("swapped", [True, False])
def test_positives_of_triplets_should_be_the_near_ones(swapped: bool) -> None:
    def of(model: nn.Module, batch: Any) -> Tensor:
        order = batch[1].argsort()
        anchors, near = batch[0][order], batch[0][order].roll(1, 0)
        others = near, anchors.roll(len(order) // 2, 0)
        a, b, c = (model(x) for x in (anchors, *(others[::-1] if swapped else others)))
        return F.triplet_margin_loss(a, b, c, margin=0.1)

    facts = facts_of("pairs-reversed", setup(loss=of, batches=of_pairs(0.5, True).batches))
    assert (facts[0].numbers["share"] < 0.2) is swapped
    assert strengths_of("pairs-reversed", facts) == ["act"] * swapped


def test_labels_without_a_relation_to_the_inputs_reverse_no_pairs() -> None:
    """Though a margin leaves out the pairs that are far apart."""
    of = of_pairs(0.5, True)
    generator = torch.Generator().manual_seed(0)
    noise = tuple((torch.randn(x.shape, generator=generator), y) for x, y in of.batches)
    facts = facts_of("pairs-reversed", replace(of, batches=noise))
    assert facts[0].numbers["share"] == pytest.approx(0.5, abs=0.15)
    assert strengths_of("pairs-reversed", facts) == []
    assert facts_of("pairs-reversed", setup()) == ()


def test_shares_and_limits_are_those_of_the_outputs() -> None:
    (fact,) = told("targets-misplaced", over_time(lambda y: y)).facts
    assert fact.numbers["share"] <= 1 / 3, "only the first place of the first sample"
    (fact,) = told(VAIN, compared(lambda z, y: (z - 5).square().mean() + 0.25)()).facts
    assert fact.numbers["lowest"] == pytest.approx(0.25, abs=1e-5), "least squares, exactly"
    assert fact.numbers["zeros"] == pytest.approx(25.25)
    (fact,) = told("logits-as-probabilities", compared(dice, several)(), trained=True).facts
    assert fact.numbers["at"] == pytest.approx(0, abs=0.02) and fact.numbers["beyond"] < -0.2
    bed = setup(loss=lambda m, b: loss(m, b) - size(m).item())
    (fact,) = told("term-without-graph", bed).facts
    assert fact.numbers["value"] == pytest.approx(size(bed.model).item())
    for of, target in ((BCE, as_mask), (shares_of, several)):
        (fact,) = told("targets-out-of-range", compared(of, target)()).facts
        assert fact.numbers["share"] == pytest.approx(0.5, abs=0.2)


def test_a_loss_without_a_bound_is_told_from_one_with_a_bound() -> None:
    """Samples with negative weights have none by construction."""

    def policy(model: nn.Module, batch: Any) -> Tensor:
        x, action, advantage = batch
        chosen = model(x).log_softmax(1).gather(1, action[:, None])[:, 0]
        return -(chosen * advantage).mean()

    def error(model: nn.Module, batch: Any) -> Tensor:  # no weight: it is not linear so far
        return -(100 + model(batch[0])[:, 0] - batch[2]).abs().mean()

    def likelihood(model: nn.Module, batch: Any) -> Tensor:
        """Of a normal distribution whose variance is learnt: it is below zero, and has a bound."""
        mean, log_variance = model(batch[0])[:, 0] / 10, model(batch[0])[:, 1]
        wanted = 0.01 * (batch[1] - 1)
        return (log_variance + (wanted - mean).square() / log_variance.exp()).mean()

    with_rewards = tuple((x, y, -1.0 - y) for x, y in batches())
    minus, likeness = of_outputs(lambda z, y: -F.cross_entropy(z, y)), lambda z, y: -cosine(z, y)
    for of, given, negative in (
        *((policy, with_rewards, [32]), (error, with_rewards, [0]), (minus, batches(), [0])),
        *(
            (likelihood, batches(), []),
            (of_outputs(likeness), compared(likeness, one_hot)().batches, []),
        ),
        (loss, batches(), []),
    ):
        bed = setup(loss=of, batches=given, optimizer=adam)
        answered = told("unbounded-loss", bed, trained=True)
        assert [fact.numbers["negative"] for fact in answered.facts] == negative, of
        assert {fact.numbers["times"] for fact in answered.facts} <= {64} and not answered.untold


def test_a_run_whose_loss_has_no_gradient_is_to_be_acted_on() -> None:
    """Through a whole run: a question names the place, or else the gradient that is zero."""
    for of, strength in ((itself, "act"), (satisfied, "act"), (F.cross_entropy, None)):
        seen = observe(setup(loss=of_outputs(of), steps=12), every_n_steps=4)
        found = {finding.name: finding.strength for finding in diagnose(seen)}
        assert found.get("zero-gradient") == strength


# Outputs that pass a function which the loss has, too


def calls(function: Callable[[Tensor], Tensor]) -> nn.Module:
    """Return a model that applies a function to a layer's outputs."""
    return Computes(lambda m, x: function(m.layer(x)), layer=nn.Linear(12, 3))


def poisson(log_input: bool) -> OfPair:
    return lambda z, y: F.poisson_nll_loss(z[:, 0], y.float(), log_input=log_input)


def binary(of: OfPair) -> OfPair:
    return lambda z, y: of(z[:, 0], y / 2)


@pytest.mark.parametrize(
    ("last", "of", "name"),
    [
        (nn.ReLU(inplace=True), F.cross_entropy, "relu"),
        (nn.Hardtanh(), F.cross_entropy, "hardtanh"),
        (nn.Softmax(1), F.cross_entropy, "softmax"),
        (nn.Identity(), F.cross_entropy, None),
        (nn.Sigmoid(), binary(BCE), "sigmoid"),
        (nn.Sigmoid(), binary(F.binary_cross_entropy), None),
        (calls(torch.exp), poisson(True), "exp"),
        (nn.Softplus(), poisson(True), "softplus"),
        (nn.Identity(), poisson(True), None),
        (calls(torch.exp), poisson(False), None),
        (nn.Softmax(1), lambda z, y: -Categorical(logits=z).log_prob(y).mean(), "softmax"),
        (nn.Sigmoid(), lambda z, y: -Categorical(logits=z).log_prob(y).mean(), None),
        (nn.Softplus(), poisson(False), None),
    ],
)
def test_a_function_behind_the_last_layer_that_the_loss_has_too(
    last: Any, of: OfPair, name: str | None
) -> None:
    model = last if isinstance(last, Computes) else nn.Sequential(mlp(), last)
    found = activated_output(setup(model=model, loss=of_outputs(of)).fork())
    path = "" if isinstance(last, Computes) else "1"
    assert found == (name and ActivatedOutput(name, path))


@pytest.mark.parametrize("function", [lambda x: x.clamp(min=0), lambda x: x.relu()[:, :3]])
def test_a_relu_that_is_called_is_told(function: Any) -> None:
    found = activated_output(setup(model=calls(function)).fork())
    assert found == ActivatedOutput("relu", "")
