"""What is asked about the model: each bug is named where it is planted, its healthy kin are not."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from computes import Computes
from torch import Tensor, nn
from torch.nn import functional
from trial_setups import (
    Row,
    answer,
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

from adiv_monitor.audit.experiments.observe import observe
from adiv_monitor.audit.experiments.state import last_maps
from adiv_monitor.audit.training.setup import Setup
from adiv_monitor.audit.training.train import train
from adiv_monitor.audit.trials.fixes import FIXES, DoesNotApply
from adiv_monitor.diagnosis import diagnose
from adiv_monitor.diagnosis.record import Probed

HERE = "test_probes_of_models.py:"


class Net(nn.Module):
    """Two layers and a function that uses them."""

    def __init__(self, function: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.function = function
        self.first, self.head = nn.Linear(12, 8), nn.Linear(8, 3)
        self.listed, self.moved = [nn.Linear(8, 8)], [nn.Parameter(torch.zeros(8)) * 1]
        self.graph = nn.Buffer(torch.eye(32) + torch.eye(32).roll(1, 0))
        self.gate, self.drop = nn.Parameter(torch.zeros(1)), nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x)


def net(function: Callable[[Any, Tensor], Tensor]) -> Callable[[], Setup]:
    return lambda: setup(model=Net(function))


def between(function: Callable[[Tensor], Tensor]) -> Callable[[], Setup]:
    """A function of the hidden features."""
    return net(lambda net, x: net.head(function(net.first(x))))


def plain(net: Any, x: Tensor) -> Tensor:
    return net.head(net.first(x).relu())


# Axes, samples and places


def reshaped(*shapes: tuple[int, ...]) -> Callable[[], Setup]:
    def function(net: Any, x: Tensor) -> Tensor:
        z = x
        for shape in shapes:
            z = z.reshape(shape)
        return plain(net, z.reshape(x.shape))

    return net(function)


def shifted(net: Any, x: Tensor) -> Tensor:
    """Scores of relative positions are shifted by a reshape, as XLNet's are."""
    scores = x.reshape(-1, 3, 4)
    padded = functional.pad(scores, (0, 1)).reshape(-1, 5, 3)[:, :4]
    moved = scores.reshape(-1, 4, 3)[:, 1:].reshape(-1, 3, 3)
    return net.head(net.first(x)) + padded.sum(1) + moved.sum(1)


def at_indices(net: Any, x: Tensor) -> Tensor:
    z = plain(net, x)
    return z + torch.zeros_like(z).index_add(0, torch.arange(len(z)).roll(1), z)


def among_samples(net: Any, x: Tensor) -> Tensor:
    z = plain(net, x)
    return z + (z @ z.T).softmax(1) @ z


def packed(apart: bool) -> Setup:
    """The mean over each graph's nodes, or over all nodes of the batch."""

    def forward(m: nn.Module, x: Tensor, graph: Tensor, count: int) -> Tensor:
        nodes = m.layer(x).relu()
        if not apart:
            return m.head(nodes.mean(0, keepdim=True)).expand(count, -1)
        sums = torch.zeros(count, 8).index_add(0, graph, nodes)
        return m.head(sums / graph.bincount()[:, None])

    def of(model: nn.Module, batch: Any) -> Tensor:
        return functional.cross_entropy(model(batch[0], batch[1], len(batch[2])), batch[2])

    graph = torch.arange(6).repeat_interleave(torch.tensor([3, 5, 4, 6, 3, 4]))
    made = tuple((torch.randn(25, 5), graph, torch.arange(6) % 3) for _ in range(4))
    model = Computes(forward, layer=nn.Linear(5, 8), head=nn.Linear(8, 3))
    return setup(model=model, batches=made, loss=of)


def of_nodes() -> Setup:
    def of(model: nn.Module, batch: Any) -> Tensor:
        return functional.cross_entropy(model(batch[2].T @ batch[0]), batch[1])

    edges = (torch.rand(32, 32, generator=torch.Generator().manual_seed(0)) < 0.1).float()
    return setup(batches=[(x, y, edges) for x, y in batches()], loss=of)


def along_the_second(positions: bool) -> Setup:
    """Attention along the first axis; learnt positions tell that the second one is that of time."""
    places = nn.Parameter(torch.randn(1, 5, 8)) if positions else 0.0
    attends = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0)
    model = Computes(lambda m, x: m.attends(x + m.places), places=places, attends=attends)
    made = ((torch.randn(7, 5, 8), torch.randint(3, (7, 5))),)
    return setup(model=model, loss=of_places, batches=made)


@of_outputs
def of_places(z: Tensor, y: Tensor) -> Tensor:
    return functional.cross_entropy(z.flatten(0, 1), y.flatten() % 3)


MATRIX = torch.ones(32, 32).tril()
MEANS = MATRIX / MATRIX.sum(1, keepdim=True)
SAMPLES: list[Row] = [
    ("reshape-scrambles", "two axes", reshaped((-1, 4, 3), (-1, 3, 4)), "reshapes"),
    ("reshape-scrambles", "three axes", reshaped((-1, 6, 2), (-1, 2, 2, 3)), "reshapes"),
    ("reshape-scrambles", "the samples", reshaped((12, -1)), "reshapes"),
    ("reshape-scrambles", "rows of channels", reshaped((-1, 2, 1, 6), (-1, 2)), "reshapes"),
    ("reshape-scrambles", "an axis of one", reshaped((-1, 4, 3), (-1, 4, 1, 3)), ""),
    ("reshape-scrambles", "joined axes", reshaped((-1, 4, 3), (128, 3)), ""),
    ("reshape-scrambles", "a split axis", reshaped((-1, 4, 3), (-1, 2, 2, 3)), ""),
    ("reshape-scrambles", "a shift", net(shifted), ""),
    ("samples-mixed", "a softmax", net(lambda net, x: plain(net, x).softmax(0)), "softmax"),
    ("samples-mixed", "attention", net(among_samples), "matmul"),
    ("samples-mixed", "places in the batch",
     net(lambda net, x: plain(net, x) + torch.arange(len(x))[:, None]), " "),
    ("samples-mixed", "nothing", net(plain), ""),
    ("samples-mixed", "the second axis", lambda: along_the_second(True), " "),
    ("samples-mixed", "packed graphs", lambda: packed(False), " "),
    ("samples-mixed", "packed graphs apart", lambda: packed(True), ""),
    ("samples-mixed", "noise", net(lambda net, x: plain(net, x) + torch.randn(len(x), 3)),
     "untold: the model draws random numbers"),
    ("samples-mixed", "nodes by number", net(at_indices), "graph"),
    ("samples-mixed", "nodes by a matrix", net(lambda net, x: net.graph @ plain(net, x)), "graph"),
    ("samples-mixed", "edges in the batch", of_nodes, "edges of a graph"),
    ("samples-mixed", "the second axis, of what", lambda: along_the_second(False), "second axis"),
    ("row-spread", "sums of neighbours", between(lambda x: MATRIX @ x), "up to 32 rows"),
    ("row-spread", "sparse ones", between(lambda x: MATRIX.to_sparse() @ x), "up to 32 rows"),
    ("row-spread", "means", between(lambda x: MEANS @ x), ""),
    ("row-spread", "sparse means", between(lambda x: MEANS.to_sparse() @ x), ""),
]  # fmt: skip


# Gradients, factors and parts


class Centres(nn.Module):
    """A loss with a centre for each class."""

    def __init__(self) -> None:
        super().__init__()
        self.centres = nn.Parameter(torch.randn(3, 3))

    def forward(self, model: nn.Module, batch: Any) -> Tensor:
        return functional.cross_entropy(model(batch[0]) @ self.centres, batch[1])


class Passed(torch.autograd.Function):
    """Calls functions that are not seen, as a compiled extension does."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        with torch._C.DisableTorchFunction():
            return 2 * x

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return 2 * grads[0]


def straight_through(z: Tensor) -> Tensor:
    return z + (z.round() - z).detach()


def under_no_grad(net: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        z = net.first(x).relu()
    return net.head(z)


def coded(draw: Callable[[Tensor, Tensor], Tensor]) -> Callable[[], Setup]:
    """An autoencoder with a code of mean and spread."""

    def forward(model: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
        mean, spread = model.encoder(x).chunk(2, 1)
        return model.decoder(draw(mean, spread.exp())), mean

    def of(model: nn.Module, batch: Any) -> Tensor:
        made, mean = model(batch[0])
        return functional.mse_loss(made, batch[0]) + 0.01 * mean.square().mean()

    make = lambda: Computes(forward, encoder=nn.Linear(12, 4), decoder=nn.Linear(2, 12))  # noqa: E731
    return with_model(make, loss=of)


def unassigned(net: Any, x: Tensor) -> Tensor:
    z = net.first(x)
    z.relu()
    return net.head(z)


def with_model(make: Callable[[], nn.Module], **changes: Any) -> Callable[[], Setup]:
    return lambda: setup(model=make(), **changes)


GRADIENTS: list[Row] = [
    ("gradient-cut", "detach", between(lambda z: z.detach()), "detach"),
    ("gradient-cut", "no_grad", net(under_no_grad), " "),
    ("gradient-cut", "data", between(lambda z: z.data.relu()), "data"),
    ("gradient-cut", "data beside a block", between(lambda x: x.data + x.relu()), "data"),
    ("gradient-cut", "a sample without a path", coded(torch.normal), "normal"),
    ("gradient-cut", "sample()",
     coded(lambda m, s: torch.distributions.Normal(m, s).sample()), "normal"),
    ("gradient-cut", "rsample()",
     coded(lambda m, s: torch.distributions.Normal(m, s).rsample()), ""),
    ("gradient-cut", "noise", coded(lambda m, s: m + s * torch.normal(torch.zeros_like(m))), ""),
    ("gradient-cut", "straight-through", between(straight_through), ""),
    ("gradient-cut", "a target",
     net(lambda net, x: plain(net, x) - plain(net, x.flip(1)).detach()), ""),
    ("gradient-cut", "a custom function", between(Passed.apply), ""),
    ("gradient-cut", "nothing", net(plain), ""),
    ("added-to-itself", "by a sign", between(lambda h: h + h), "add"),
    ("added-to-itself", "by a function", between(lambda h: torch.add(h, h)), "add"),
    ("added-to-itself", "twice", between(lambda h: 2 * h), ""),
    ("added-to-itself", "its ReLU", between(lambda h: h + h.relu()), ""),
    ("added-to-itself", "its copy", between(lambda h: h + h.clone()), ""),
    ("added-to-itself", "the loss",
     lambda: setup(loss=lambda m, b: (x := m(b[0]).square().mean()) + x), ""),
    ("hidden-parameters", "a list",
     net(lambda net, x: net.head(net.listed[0](net.first(x)))), "listed[0].weight"),
    ("hidden-parameters", "a layer made anew", between(lambda z: nn.Linear(8, 8)(z)),
     f"linear ({HERE}"),
    ("hidden-parameters", "a matrix made anew",
     between(lambda z: z @ nn.Parameter(torch.randn(8, 8))), "matmul"),
    ("hidden-parameters", "a result",
     net(lambda net, x: net.head(net.first(x) + net.moved[0])), "moved"),
    ("hidden-parameters", "of a loss", lambda: setup(loss=Centres()), "its own, 'centres', that"),
    ("hidden-parameters", "nothing", net(plain), ""),
    ("no-activation", "one in place", between(lambda z: z.relu_()), ""),
    ("no-activation", "one in a custom function", between(lambda z: Passed.apply(z.relu())), ""),
    ("no-activation", "one layer", with_model(lambda: nn.Linear(12, 3)), ""),
]  # fmt: skip


# Attention and tokens

Weighing = Callable[["Attending", Tensor, Tensor, Tensor], Tensor]


class Attending(nn.Module):
    """Four places of three features each, with two heads of four features, and a way to attend."""

    def __init__(self, attend: Weighing) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.attend, self.drop = attend, nn.Dropout(0.2)
        self.take, self.qkv, self.head = nn.Linear(3, 8), nn.Linear(8, 24), nn.Linear(8, 3)
        self.logits = nn.Linear(4, 5)

    def forward(self, x: Tensor) -> Tensor:
        z = self.take(x.reshape(-1, 4, 3))
        q, k, v = self.qkv(z).reshape(len(z), 4, 3, 2, 4).permute(2, 0, 3, 1, 4)
        return self.head(self.attend(self, q, k, v).mean(2).flatten(1))


def scores(q: Tensor, k: Tensor) -> Tensor:
    return q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5


def along(axis: int) -> Weighing:
    return lambda net, q, k, v: net.drop(scores(q, k).softmax(axis)) @ v


def masked(axis: int) -> Weighing:
    def attend(net: Attending, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        s = scores(q, k).masked_fill(~torch.ones(4, 4, dtype=torch.bool).tril(), -torch.inf)
        return torch.bmm(functional.softmax(s, dim=axis).flatten(0, 1), v.flatten(0, 1)).view_as(v)

    return attend


def einsum(axis: int) -> Weighing:
    def attend(net: Attending, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        weights = torch.einsum("...qd,...kd->...qk", q, k).softmax(axis)
        return torch.einsum("bhqk,bhkd->bhqd", weights, v)

    return attend


def slots(net: Attending, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Slots compete for places, and take means of what they got (Locatello et al. 2020)."""
    weights = scores(q, k).softmax(-2) + 1e-6
    return weights / weights.sum(-1, keepdim=True) @ v


def clusters(net: Attending, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Each place is assigned to clusters, whose members are summed (Ying et al. 2018)."""
    assigned = net.logits(q).softmax(-1)
    return (assigned.transpose(-1, -2) @ v)[..., :4, :]


def attends(weighing: Weighing) -> Callable[[], Setup]:
    return lambda: setup(model=Attending(weighing))


def weighed(axis: int) -> nn.Module:
    def sums(m: nn.Module, x: Tensor) -> Tensor:
        x = x.view(len(x), 3, 4)
        return m.head((m.score(x).softmax(axis) * x).sum(1))

    return Computes(sums, score=nn.Linear(4, 1), head=nn.Linear(4, 3))


class OfTokens(nn.Module):
    """A recurrent network of tokens, in one direction or both."""

    def __init__(self, both_ways: bool = False) -> None:
        super().__init__()
        width = 4 if both_ways else 8
        self.words = nn.Embedding(9, 8)
        self.gru = nn.GRU(8, width, batch_first=True, bidirectional=both_ways)
        self.head = nn.Linear(8, 9)

    def forward(self, tokens: Tensor, labels: Tensor | None = None) -> Any:
        z = self.head(self.gru(self.words(tokens))[0])
        return z if labels is None else (z, functional.cross_entropy(z.transpose(1, 2), labels))


class Shifting(OfTokens):
    """Sees only the tokens before each place, as models do that shift their inputs themselves."""

    def forward(self, tokens: Tensor, labels: Tensor | None = None) -> Any:
        return super().forward(functional.pad(tokens[:, :-1], (1, 0)), labels)


def own_loss(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
    result: Tensor = model(batch[0][:, :-1], batch[0][:, 1:])[1]
    return result


def ahead(first: int, inputs: slice = slice(0, 10)) -> Callable[[nn.Module, Any], Tensor]:
    """A loss whose first target is this token; the model gets a part of all."""

    def of(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
        z = model(batch[0][:, inputs])
        y = batch[0][:, first : first + z.shape[1]]
        return functional.cross_entropy(z[:, : y.shape[1]].flatten(0, 1), y.flatten())

    return of


def text(of: Any, make: Callable[[], nn.Module] = OfTokens) -> Callable[[], Setup]:
    drawn = torch.Generator().manual_seed(0)
    made = [(torch.randint(1, 9, (8, 11), generator=drawn),) for _ in range(4)]
    return lambda: setup(model=make(), loss=of, batches=made)


BOTH = partial(OfTokens, both_ways=True)
TOKENS: list[Row] = [
    ("attention-axis", "the queries", attends(along(-2)), f"softmax ({HERE}"),
    ("attention-axis", "the queries, masked", attends(masked(-2)), f"softmax ({HERE}"),
    ("attention-axis", "the queries, by einsum", attends(einsum(2)), f"softmax ({HERE}"),
    ("attention-axis", "the keys", attends(along(-1)), ""),
    ("attention-axis", "the keys, masked", attends(masked(-1)), ""),
    ("attention-axis", "the keys, by einsum", attends(einsum(3)), ""),
    ("attention-axis", "slots", attends(slots), ""),
    ("attention-axis", "clusters", attends(clusters), ""),
    ("softmax-of-one", "a single score", with_model(lambda: weighed(-1)), "axis of length 1"),
    ("softmax-of-one", "three scores", with_model(lambda: weighed(1)), ""),
    ("future-leak", "both ways", text(ahead(1), BOTH), "later input tokens"),
    ("future-leak", "both ways, its own loss", text(own_loss, BOTH), "later input tokens"),
    ("future-leak", "one way", text(ahead(1)), ""),
    ("future-leak", "one way, its own loss", text(own_loss), ""),
    ("future-leak", "both ways, the same token", text(ahead(0), BOTH), ""),
    ("target-is-input", "the same token", text(ahead(0)), "token 0 places after"),
    ("target-is-input", "the same token, both ways", text(ahead(0), BOTH), ""),
    ("target-is-input", "the next token", text(ahead(1)), ""),
    ("target-is-input", "the next token, both ways", text(ahead(1), BOTH), ""),
    ("target-is-input", "the one before", text(ahead(0, slice(1, 11))), "token -1 places after"),
    ("target-is-input", "the one after", text(ahead(2, slice(0, 9))), "token 2 places after"),
    ("target-is-input", "far ahead", text(ahead(3, slice(0, 8))), ""),
    ("target-is-input", "a model that shifts", text(ahead(0), Shifting), ""),
    ("target-is-input", "shifted twice", text(ahead(1), Shifting), "token 2 places after"),
]


# Outputs, and evaluation mode


def hidden(*layers: nn.Module, last: nn.Module | None = None) -> nn.Module:
    return nn.Sequential(nn.Linear(12, 16), *layers, last or nn.Linear(16, 3))


def of_scale(layer: nn.Module, scale: float) -> nn.Module:
    nn.init.constant_(layer.weight, scale)  # type: ignore[arg-type]
    return layer


def pinched() -> nn.Module:
    """Units that are dead because of one constant in front of them."""
    into, out = of_scale(nn.Linear(16, 1), 0.1), of_scale(nn.Linear(1, 16), -9.0)
    return hidden(into, nn.Sigmoid(), out, nn.ReLU())


def branched(branch: nn.Module, last: nn.Module) -> nn.Module:
    """Return a sum of features and a branch of them, in front of a last layer."""
    of = lambda m, x: m.last((z := m.first(x)) + m.branch(z))  # noqa: E731
    return Computes(of, first=nn.Linear(12, 16), branch=branch, last=last)


def attended(x: Tensor, rate: float) -> Tensor:
    x = x.unflatten(1, (2, 4))
    return functional.scaled_dot_product_attention(x, x, x, dropout_p=rate).flatten(1)


def dropping(function: Callable[[Tensor, Any], Tensor]) -> Callable[[], Setup]:
    return net(lambda net, x: net.head(function(net.first(x).relu(), net)))


def normed(**options: Any) -> Callable[[], Setup]:
    return with_model(lambda: hidden(nn.BatchNorm1d(16, **options), nn.ReLU()))


def in_eval(keeps: bool) -> nn.Module:
    class Kept(nn.Sequential):
        def train(self, mode: bool = True) -> nn.Module:
            super().train(mode)
            self[1].train(mode and not keeps)
            return self

    return Kept(nn.Linear(12, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3))


def residual(m: nn.Module, x: Tensor) -> Tensor:
    """Compute a sum with a branch that drops entries."""
    z = m.layer(x)
    return z + m.drop(z.relu())


def ends_in(last: nn.Module, of: Any = loss) -> Setup:
    torch.manual_seed(0)
    return setup(model=nn.Sequential(hidden(nn.ReLU()), last), loss=of)


OUTPUTS: list[Row] = [
    ("outputs-constant", "a norm of each feature",
     with_model(lambda: hidden(nn.GroupNorm(16, 16), nn.Sigmoid())), "GroupNorm '1'"),
    ("outputs-constant", "a norm of groups",
     with_model(lambda: hidden(nn.GroupNorm(4, 16), nn.Sigmoid())), ""),
    ("outputs-constant", "a weight of 0",
     with_model(lambda: hidden(of_scale(nn.BatchNorm1d(16), 0.0), nn.ReLU())), "BatchNorm1d '1'"),
    ("outputs-constant", "a small weight",
     with_model(lambda: hidden(of_scale(nn.BatchNorm1d(16), 0.1), nn.ReLU())), ""),
    *[("no-activation", "none, but at the end",
       with_model(lambda last=last: hidden(last=nn.Sequential(nn.Linear(16, 3), last))), "affine")
      for last in (nn.Sigmoid(), nn.Softmax(1))],
    ("outputs-constant", "zeros", with_model(pinched), "ReLU '4'"),
    ("outputs-constant", "a branch that begins at 0",
     with_model(lambda: branched(of_scale(nn.LayerNorm(16), 0.0), nn.Linear(16, 3))), ""),
    ("outputs-constant", "a constant branch",
     with_model(lambda: branched(nn.GroupNorm(16, 16), nn.Identity())), ""),
    ("outputs-constant", "a last layer that begins at 0",
     with_model(lambda: hidden(last=of_scale(nn.Linear(16, 3), 0.0))), ""),
    ("dropout-in-eval", "a function", dropping(lambda x, _: functional.dropout(x, 0.5)), "50%"),
    ("dropout-in-eval", "torch's", dropping(lambda x, _: torch.dropout(x, 0.5, True)), "50%"),
    ("dropout-in-eval", "attention", dropping(lambda x, _: attended(x, 0.5)), "50%"),
    ("dropout-in-eval", "as it trains",
     dropping(lambda x, net: functional.dropout(x, 0.5, net.training)), ""),
    ("dropout-in-eval", "a module", dropping(lambda x, net: net.drop(x)), ""),
    ("dropout-in-eval", "a VAE's samples", dropping(lambda x, _: x + torch.randn_like(x)), ""),
    ("dropout-in-eval", "attention as it trains",
     dropping(lambda x, net: attended(x, 0.5 * net.training)), ""),
    ("dropout-in-eval", "Monte-Carlo dropout", dropping(lambda x, net: net.drop.train()(x)), ""),
    ("running-statistics", "none of a batch", normed(momentum=0.0), "'1'"),
    ("running-statistics", "little of a batch", normed(momentum=0.001), "'1'"),
    ("running-statistics", "the last batch", normed(momentum=0.99), "'1'"),
    ("running-statistics", "torch's default", normed(), ""),
    ("running-statistics", "EfficientNet's", normed(momentum=0.01), ""),
    ("running-statistics", "the mean of all batches", normed(momentum=None), ""),
    ("running-statistics", "none", normed(momentum=0.99, track_running_stats=False), ""),
    ("left-in-eval", "by its own train()", with_model(lambda: in_eval(keeps=True)), "'1'"),
    ("left-in-eval", "no norm", with_model(lambda: in_eval(keeps=False)), ""),
    ("dropout-on-outputs", "hidden", with_model(lambda: hidden(nn.ReLU(), nn.Dropout(0.3))), ""),
    ("dropout-on-outputs", "of rate 0", lambda: ends_in(nn.Dropout(0.0)), ""),
    ("dropout-on-outputs", "in a branch", with_model(
        lambda: Computes(residual, layer=nn.Linear(12, 12), drop=nn.Dropout(0.2)),
        loss=lambda m, b: functional.mse_loss(m(b[0]), b[0])), ""),
]  # fmt: skip
ROWS = [*SAMPLES, *GRADIENTS, *TOKENS, *OUTPUTS]


@each_of(ROWS)
def test_a_fault_is_named_and_what_is_like_it_is_not(
    question: str, make: Callable[[], Setup], part: str
) -> None:
    assert_said(question, make(), part)


def test_a_lost_activation_is_named_beside_the_affine_layers() -> None:
    lost, affine = told("no-activation", setup(model=Net(unassigned))).facts
    assert f"Nothing uses the result of relu ({HERE}" in said("no-activation", lost)[0]
    assert "The outputs of 2 layers are" in said("no-activation", affine)[0]


@pytest.mark.parametrize(
    "of",
    [
        loss,
        of_outputs(lambda z, y: functional.nll_loss(z.log_softmax(1), y)),
        lambda m, b: (m(b[0])[:, 0] - b[0][:, 0]).square().mean(),
    ],
)
def test_dropout_on_what_is_compared_is_named_and_left_out(of: Any) -> None:
    dropped, bare = ends_in(nn.Dropout(0.5), of), ends_in(nn.Identity(), of)
    assert_said("dropout-on-outputs", dropped, "dropout in '1'")
    assert_said("dropout-on-outputs", dropped, "sets 50%")
    fork = dropped.fork()
    FIXES["outputs-without-dropout"].apply(fork)
    assert train(fork).losses == train(bare.fork()).losses
    assert_said("dropout-on-outputs", bare, "")
    with pytest.raises(DoesNotApply):
        FIXES["outputs-without-dropout"].apply(bare.fork())


def views(model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
    x, net = batch[0], model.net
    return net(x + 0.3 * torch.randn_like(x)), net(x + 0.3 * torch.randn_like(x))


def alike(model: nn.Module, batch: Any) -> Tensor:
    return -functional.cosine_similarity(*views(model, batch)).mean()


def with_negatives(model: nn.Module, batch: Any) -> Tensor:
    a, b = (functional.normalize(z) for z in views(model, batch))
    return functional.cross_entropy(a @ b.T / 0.1, torch.arange(len(a)))


def classified(model: nn.Module, batch: Any) -> Tensor:
    return functional.cross_entropy(views(model, batch)[0], batch[1])


@pytest.mark.parametrize(
    ("of_views", "is_named"), [(alike, True), (with_negatives, False), (classified, False)]
)
def test_outputs_that_collapse_are_told_where_the_loss_keeps_none_apart(
    of_views: Any, is_named: bool
) -> None:
    torch.manual_seed(0)  # a part that a loss of two views calls by itself
    part = nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 8))
    of = setup(model=nn.ModuleDict({"net": part}), loss=of_views)
    trained = of.fork()
    assert answer("collapsed", of, trained) == Probed()
    with torch.no_grad():
        trained.model.net[2].weight *= 1e-3  # type: ignore[index, operator, union-attr]
    found = answer("collapsed", of, trained)
    assert bool(found.facts) is is_named and not found.untold
    assert [x[:3] for x in said("collapsed", *found.facts)] == ["act"] * is_named


def equation(wants: float) -> Callable[[nn.Module, Any], Tensor]:
    """u′ = −u at inputs, with u(0) = wants."""

    def of(model: nn.Module, batch: Any) -> Tensor:
        x = batch[0].detach().requires_grad_()
        u = model(x)
        (slope,) = torch.autograd.grad(u.sum(), x, create_graph=True)
        return (slope + u).square().mean() + (model(torch.zeros(1, 1)) - wants).square().sum()

    return of


@pytest.mark.parametrize("wants", [0.0, 1.0])
def test_an_equation_that_zero_solves_is_told(wants: float) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(1, 16), nn.Tanh(), nn.Linear(16, 1))
    points = tuple((torch.rand(32, 1),) for _ in range(8))
    of = setup(model=model, batches=points, loss=equation(wants), steps=60,
               optimizer=lambda m: torch.optim.Adam(m.parameters(), 0.01))  # fmt: skip
    assert_said("collapsed", of, "" if wants else "watch: The outputs shrink", trained=True)


class Places(nn.Module):
    """Attention over the places of a line of words, which may have positions."""

    def __init__(self, causal: bool = False, positions: float | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.causal, self.head = nn.Embedding(9, 8), causal, nn.Linear(8, 3)
        self.places = None if positions is None else nn.Parameter(torch.full((7, 8), positions))

    def forward(self, words: Tensor) -> Tensor:
        x = self.words(words) + (0.0 if self.places is None else self.places)
        mixed = functional.scaled_dot_product_attention(x, x, x, is_causal=self.causal)
        return self.head((x + mixed).relu())


def test_order_that_is_ignored_is_told_from_places_by_themselves_and_from_masks() -> None:
    """Learnt positions that begin at zero are not missing."""
    lines = torch.randint(9, (16, 7), generator=torch.Generator().manual_seed(0))

    def of_lines(model: nn.Module, lines: Tensor = lines) -> Setup:
        return setup(model=model, loss=of_places, batches=((lines, lines.clone()),))

    assert_said("order-ignored", of_lines(Places()), "the 7 positions")
    alone = nn.Sequential(nn.Embedding(9, 8), nn.ReLU(), nn.Linear(8, 3))
    for model in (Places(causal=True), alone):
        assert_said("order-ignored", of_lines(model), "")
    assert told("order-ignored", of_lines(Places(), torch.ones_like(lines))) == Probed(
        untold="all positions are equal"
    )
    of = of_lines(Places(positions=0.0))
    trained = of.fork()
    assert answer("order-ignored", of, trained).facts, "it is not trained yet"
    with torch.no_grad():
        trained.model.places.add_(torch.randn(7, 8))  # type: ignore[operator, union-attr]
    assert not answer("order-ignored", of, trained).facts


def of_features(features: slice) -> nn.Module:
    def forward(net: Any, x: Tensor) -> Tensor:
        kept = torch.zeros_like(x)
        kept[:, features] = x[:, features]
        return plain(net, kept)

    return Net(forward)


def test_features_that_are_ignored_are_named_and_constant_ones_are_not() -> None:
    (fact,) = told("input-partly-ignored", setup(model=of_features(slice(0, 7)))).facts
    assert fact.place == "features 7, 8, 9 and 2 more of the input"
    assert fact.numbers["share"] == 5 / 12
    padded = tuple((x * (torch.arange(12) < 7), y) for x, y in batches())
    nothing = setup(model=of_features(slice(0, 0)))  # that is another finding
    for of in (setup(model=of_features(slice(0, 7)), batches=padded), nothing, setup()):
        assert_said("input-partly-ignored", of, "")


@pytest.mark.parametrize(
    ("pool", "shape"), [(nn.MaxPool2d(2), (1, 9, 9)), (nn.AvgPool1d(4), (2, 35))]
)
def test_a_border_that_does_not_fit_is_not_named(pool: nn.Module, shape: tuple[int, ...]) -> None:
    images = torch.randn(64, *shape)
    model = nn.Sequential(pool, nn.Flatten(), nn.Linear(16, 3))
    made = tuple(zip(images.split(32), torch.randint(3, (64,)).split(32), strict=True))
    assert_said("input-partly-ignored", setup(model=model, batches=made), "")


def test_a_transposed_convolution_may_be_the_last_layer() -> None:
    decoder = nn.Unflatten(1, (2, 1, 1)), nn.ConvTranspose2d(2, 3, 1), nn.Flatten()
    assert last_maps(setup(model=nn.Sequential(nn.Linear(12, 2), *decoder)).fork())[0] == ["2"]


def test_a_module_that_loses_the_inputs_is_named() -> None:
    """Through a whole run: the question gives the name, and the run that inputs do not matter."""
    zeros = Computes(lambda m, x: x * 0)
    seen = observe(setup(model=nn.Sequential(zeros, mlp()), steps=12), every_n_steps=6)
    first, *_ = diagnose(seen)
    assert first.name == "input-ignored" and "Computes '0'" in first.summary
