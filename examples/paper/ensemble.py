"""Many small networks trained at once: stacked parameters, one batch of images per seed.

A network is affine maps with an activation between them; its method says what is done to the
input of every affine map. Networks of a seed share initial weights and the order of the images, so
their differences are paired. The mathematics is that of separate runs with `nn.Linear`, torch's
normalisers and `adiv_layers`, each with an optimizer of its own: Adam, or plain SGD.

Nearly all of the cost is in the first map, 3072 inputs wide. Its weights lie in banks of networks
that see the same input; a bank's gradient is one matrix product, which the optimizer consumes while
it is still in a CPU's cache. The rest is small: all networks as one stack, differentiated by
autograd.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import groupby, pairwise
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
import torch.nn.functional as F
from methods import METHODS, Columns, Directions, Method, Rows
from torch import Tensor, nn

ACTIVATIONS = ("tanh", "leaky", "none")
NONLINEAR = ACTIVATIONS[:2]
SLOPES = {"leaky": 0.01, "none": 1.0}  # for negative inputs; torch's default, and the identity
OPTIMIZERS = ("adam", "sgd")
BETAS, EPS = (0.9, 0.999), 1e-8  # of Adam: torch's defaults
T = TypeVar("T")
Part = TypeVar("Part", bound=Callable[..., Any])


class Through(Protocol):
    """Makes a function of many small operations fast, as `torch.compile` does."""

    def __call__(self, part: Part, /) -> Part:
        """The faster function."""


def directly(part: Part) -> Part:
    """The function itself."""
    return part


class Network(NamedTuple):
    """What tells one network of an ensemble from the others."""

    method: str
    activation: str
    seed: int
    learning_rate: float


class View(NamedTuple):
    """The images of a seed as the first map of some networks sees them, but for a row's factor."""

    seed: int
    less_mean: bool
    columns: Columns | None

    def rows(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Rows less their mean if need be, (rows, inputs), and their squares, (rows, 1)."""
        d = x - x.mean(-1, keepdim=True) if self.less_mean else x
        return d, torch.linalg.vector_norm(d, dim=-1, keepdim=True).square()


class Moments(NamedTuple):
    """Parameters with one learning rate; for Adam, running means of gradients and squares too."""

    rate: float
    values: list[Tensor]
    means: list[Tensor]
    squares: list[Tensor]


class Bank(NamedTuple):
    """First weights of networks start…stop, which share view and learning rate."""

    view: int
    start: int
    stop: int
    moments: Moments


class Ensemble:
    """Networks stacked on a leading dimension, each trained as if it were alone.

    Args:
        networks: which; `self.networks` has them in the order of the stack.
        sizes: inputs, hidden widths, classes.
        typical: root mean square length of the inputs, for networks with a constant scale.
        dtype: of parameters and inputs.
        device: where they are.
        optimizer: "adam", or "sgd" without momentum.
        residual: hidden layers but the first, all as wide, add what they give to what they take.

    Raises:
        ValueError: unknown optimizer.
    """

    def __init__(
        self,
        networks: Sequence[Network],
        sizes: Sequence[int],
        typical: float,
        dtype: torch.dtype = torch.float32,
        device: str = "cpu",
        optimizer: str = "adam",
        residual: bool = False,
    ) -> None:
        if optimizer not in OPTIMIZERS:
            raise ValueError(f"optimizer={optimizer!r}; must be one of {OPTIMIZERS}.")
        self.optimizer = optimizer
        self.residual = residual
        self.networks = sorted(networks, key=_order)
        self.seeds = sorted({network.seed for network in networks})
        self.sizes = list(sizes)
        self.step_number = 0
        self._adam_step = torch.zeros((), device=device)  # exact in float32 up to 2²⁴
        initial = {seed: _initial(seed, sizes, dtype) for seed in self.seeds}
        stacked = [
            torch.stack([initial[network.seed][i] for network in self.networks]).to(device)
            for i in range(2 * (len(sizes) - 1))
        ]
        # Biases and weights of all maps but the first weight: (networks, 1, out), (…, in, out).
        self.small = [each.requires_grad_() for each in stacked[1:]]
        self.views: list[View] = []
        self.banks = list(self._banks(stacked[0]))
        self._small_moments = list(self._stacks())
        methods = [METHODS[network.method] for network in self.networks]
        like = self.small[0].detach()
        self._first_rows = Rows(methods, sizes[0], like, typical)
        self._rows = [Rows(methods, width, like) for width in sizes[1:-1]]
        self._directions = Directions(methods, like)
        self._columns = [_column_ranges(methods, width, like) for width in sizes[1:-1]]
        tanh = [network.activation == "tanh" for network in self.networks]
        self._tanh = torch.tensor(tanh, device=device).view(-1, 1, 1)
        slopes = [SLOPES.get(network.activation, 1.0) for network in self.networks]
        self._slope = torch.tensor(slopes, dtype=dtype, device=device).view(-1, 1, 1)
        of_seed = [self.seeds.index(network.seed) for network in self.networks]
        self._of_seed = torch.tensor(of_seed, device=device)
        of_view = [bank.view for bank in self.banks for _ in range(bank.start, bank.stop)]
        self._of_view = torch.tensor(of_view, device=device)

    def step(
        self,
        images: Mapping[int, Tensor],
        labels: Mapping[int, Tensor],
        through: Through = directly,
    ) -> None:
        """One step of every network.

        Args:
            images: per seed (rows, inputs), in the ensemble's dtype.
            labels: per seed (rows,).
            through: what the functions with small operations are called through.
        """
        self.step_number += 1
        self._adam_step += 1
        seen, squares = through(self._seen)(images)
        z = self.first_products(seen).requires_grad_()
        target = torch.stack([labels[seed] for seed in self.seeds])[self._of_seed]
        loss = through(self._loss)(z, squares, target)
        by_z, *by_small = torch.autograd.grad(loss, [z, *self.small])
        if self._directions.any:
            by_z, by_small[0] = self._directed(by_z, by_small[0], seen, squares)
        self.first_update(by_z, seen)
        for (start, stop), moments in self._small_moments:
            gradients = [gradient[start:stop] for gradient in by_small]
            if self.optimizer == "sgd":
                torch._foreach_add_(moments.values, gradients, alpha=-moments.rate)
            else:
                self._adam(moments, gradients)

    @torch.no_grad()
    def logits(self, images: Tensor, group: int | None = None) -> Tensor:
        """What every network says of images.

        Args:
            images: (rows, inputs), in the ensemble's dtype.
            group: batch normalisation takes the statistics of every so many rows, not those of
                training.

        Returns:
            (networks, rows, classes).
        """
        seen, squares = [], []
        plain: dict[bool, tuple[Tensor, Tensor]] = {}  # the same for all seeds
        for view in self.views:
            if view.columns is not None:
                d, square = view.rows(view.columns.evaluate(images.unsqueeze(0), group)[0])
            else:
                if view.less_mean not in plain:
                    plain[view.less_mean] = view.rows(images)
                d, square = plain[view.less_mean]
            seen.append(d)
            squares.append(square)
        return self._rest(self.first_products(seen), torch.stack(squares), group)

    def state(self) -> dict[str, object]:
        """All that training changes, for `load`."""
        return {"steps": self.step_number, "tensors": [t.detach() for t in self._tensors()]}

    def load(self, state: Mapping[str, object]) -> None:
        """Go on from what `state` returned."""
        steps, tensors = state["steps"], state["tensors"]
        assert isinstance(steps, int) and isinstance(tensors, list)
        self.step_number = steps
        self._adam_step.fill_(steps)
        with torch.no_grad():
            for mine, theirs in zip(self._tensors(), tensors, strict=True):
                mine.copy_(theirs)

    def parameters(self, network: int) -> list[Tensor]:
        """Weight (out, in) and bias of every map of one network, in the order of a model's."""
        (bank,) = (bank for bank in self.banks if bank.start <= network < bank.stop)
        width = self.sizes[1]
        first = bank.moments.values[0][(network - bank.start) * width :][:width]
        rest = [each.detach()[network] for each in self.small]
        return [first, *(each.t() if i % 2 else each[0] for i, each in enumerate(rest))]

    def first_products(self, seen: Sequence[Tensor]) -> Tensor:
        """Products of the first weights with what they see, per view: (rows, networks · width)."""
        width = self.sizes[1]
        z = seen[0].new_empty(len(seen[0]), len(self.networks) * width)
        for bank in self.banks:
            columns = z[:, bank.start * width : bank.stop * width]
            torch.mm(seen[bank.view], bank.moments.values[0].t(), out=columns)
        return z

    def first_update(self, by_z: Tensor, seen: Sequence[Tensor]) -> None:
        """The optimizer's step of the first weights, given the gradient of their products."""
        together: list[tuple[Moments, Tensor]] = []
        for bank in self.banks:
            columns = slice(bank.start * self.sizes[1], bank.stop * self.sizes[1])
            by_rows, rows = by_z[:, columns].t(), seen[bank.view]
            if self.optimizer == "sgd":
                bank.moments.values[0].addmm_(by_rows, rows, alpha=-bank.moments.rate)
            elif by_z.is_cuda:  # Adam of one bank keeps few of its multiprocessors busy
                together.append((bank.moments, by_rows @ rows))
            else:
                self._adam(bank.moments, [by_rows @ rows])
        for moments, gradients in by_rate(together):
            self._adam(moments, gradients)

    def _directed(
        self, by_z: Tensor, by_bias: Tensor, seen: Sequence[Tensor], squares: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Gradients of the first products and biases, after what their `Directions` make of them.

        The networks with one have no factors of rows: a map's gradient is that of its product.
        """
        g = by_z.view(len(by_z), len(self.networks), -1).transpose(0, 1)
        views = self._of_view[self._directions.batch].tolist()
        grams = {view: seen[view] @ seen[view].t() for view in set(views)}
        gram = torch.stack([grams[view] for view in views]) if views else by_z
        of_weight, of_bias = self._directions(g, squares[self._of_view], gram)
        summed = of_bias.sum(-2, keepdim=True)
        changed = self._directions.changed.view(-1, 1, 1)
        by_z = torch.where(changed, of_weight, g).transpose(0, 1).reshape(by_z.shape)
        return by_z, torch.where(changed, summed, by_bias)

    def _seen(self, images: Mapping[int, Tensor]) -> tuple[list[Tensor], Tensor]:
        """What every view sees of a batch to train on, and the squares of its rows."""
        seen, squares = [], []
        for view in self.views:
            x = images[view.seed]
            if view.columns is not None:
                x = view.columns.train(x.unsqueeze(0), self.step_number)[0]
            d, square = view.rows(x)
            seen.append(d)
            squares.append(square)
        return seen, torch.stack(squares)

    def _loss(self, z: Tensor, squares: Tensor, target: Tensor) -> Tensor:
        """Sum over networks of the mean loss, of the first products."""
        logits = self._rest(z, squares, None)
        loss = F.cross_entropy(logits.flatten(0, 1), target.flatten(), reduction="sum")
        return loss / target.shape[1]

    def _rest(self, z: Tensor, squares: Tensor, group: int | None) -> Tensor:
        """Logits (networks, rows, classes) of the first products, and the squares of every view.

        The first map's rows are divided behind the product, which is far smaller than they are.
        """
        factor, of_bias = self._first_rows.factors(squares[self._of_view])
        z = z.view(len(z), len(self.networks), -1).transpose(0, 1)
        z = z * factor + of_bias * self.small[0]
        rest = zip(self.small[1::2], self.small[2::2], self._columns, self._rows, strict=True)
        h: Tensor | float = 0.0
        for weight, bias, columns, rows in rest:
            branch = torch.where(self._tanh, z.tanh(), torch.where(z > 0, z, self._slope * z))
            h = h + branch if self.residual else branch
            x, of_bias = rows(self._treated(h, columns, group))
            if self._directions.any:
                z = _Directed.apply(of_bias * bias, x, weight, self._directions)
            else:
                z = torch.baddbmm(of_bias * bias, x, weight)
        return z

    def _treated(
        self, h: Tensor, ranges: Sequence[tuple[int, int, Columns | None]], group: int | None
    ) -> Tensor:
        """Hidden activations after what is done to columns, a range of networks at a time."""
        pieces = []
        for start, stop, columns in ranges:
            piece = h[start:stop]
            if columns is not None and torch.is_grad_enabled():
                piece = columns.train(piece, self.step_number)
            elif columns is not None:
                piece = columns.evaluate(piece, group)
            pieces.append(piece)
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)

    def _adam(self, moments: Moments, gradients: list[Tensor]) -> None:
        """One step of torch's fused Adam, in place."""
        torch._fused_adam_(
            *(moments.values, gradients, moments.means),
            *(moments.squares, [], [self._adam_step] * len(gradients)),
            lr=moments.rate,
            beta1=BETAS[0],
            beta2=BETAS[1],
            weight_decay=0.0,
            eps=EPS,
            amsgrad=False,
            maximize=False,
        )

    def _banks(self, weight: Tensor) -> Iterator[Bank]:
        """Banks in the order of networks; registers the views that they need."""
        views: dict[tuple[int, bool, str], int] = {}
        for (rate, seed, less_mean, kind), start, stop in _ranges(_bank(n) for n in self.networks):
            key = (seed, less_mean, kind)
            if key not in views:
                views[key] = len(views)
                columns = Columns(kind, 1, self.sizes[0], weight) if kind else None
                self.views.append(View(seed, less_mean, columns))
            values = weight[start:stop].flatten(0, 1).clone()
            yield Bank(views[key], start, stop, self._moments(rate, [values]))

    def _stacks(self) -> Iterator[tuple[tuple[int, int], Moments]]:
        """Ranges of networks with one learning rate, and views of their small parameters."""
        for rate, start, stop in _ranges(_rate(n) for n in self.networks):
            values = [each.detach()[start:stop] for each in self.small]
            yield (start, stop), self._moments(rate, values)

    def _moments(self, rate: float, values: list[Tensor]) -> Moments:
        if self.optimizer == "sgd":
            return Moments(rate, values, [], [])
        zeros = [[torch.zeros_like(value) for value in values] for _ in range(2)]
        return Moments(rate, values, *zeros)

    def _tensors(self) -> Iterator[Tensor]:
        for bank in self.banks:
            yield from (*bank.moments.values, *bank.moments.means, *bank.moments.squares)
        yield from self.small
        for _, moments in self._small_moments:
            yield from (*moments.means, *moments.squares)
        for view in self.views:
            yield from () if view.columns is None else view.columns.state()
        for layer in self._columns:
            for _, _, columns in layer:
                yield from () if columns is None else columns.state()


class _Directed(torch.autograd.Function):
    """x·W + b, whose backward pass gives W and b what `Directions` make of their gradients."""

    @staticmethod
    def forward(
        ctx: Any, bias: Tensor, x: Tensor, weight: Tensor, directions: Directions
    ) -> Tensor:
        """Of bias (networks, rows, out), x (networks, rows, in) and weight (networks, in, out)."""
        ctx.save_for_backward(x, weight)
        ctx.directions = directions
        return torch.baddbmm(bias, x, weight)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        """Gradients of bias, x and weight."""
        (g,) = gradients
        x, weight = ctx.saved_tensors
        some = x[ctx.directions.batch]
        squares = x.square().sum(-1, keepdim=True)
        of_weight, of_bias = ctx.directions(g, squares, some @ some.mT)
        return of_bias, g @ weight.mT, x.mT @ of_weight, None


def _initial(seed: int, sizes: Sequence[int], dtype: torch.dtype) -> list[Tensor]:
    """`nn.Linear`'s own weights: the first (out, in), the others (in, out), biases (1, out)."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        maps = [nn.Linear(n, m) for n, m in pairwise(sizes)]
    found = []
    for i, each in enumerate(maps):
        weight, bias = each.weight.detach().to(dtype), each.bias.detach().to(dtype)
        found += [weight.t().contiguous() if i else weight, bias.unsqueeze(0)]
    return found


def _order(network: Network) -> tuple[object, ...]:
    """Networks whose columns are treated alike lie together, and those of one bank."""
    return (METHODS[network.method].columns, *_bank(network), network)


def _bank(network: Network) -> tuple[float, int, bool, str]:
    method = METHODS[network.method]
    return (_rate(network), network.seed, method.less_mean, method.columns)


def _rate(network: Network) -> float:
    return network.learning_rate * METHODS[network.method].rate


def by_rate(
    updates: Iterable[tuple[Moments, Tensor]],
) -> Iterator[tuple[Moments, list[Tensor]]]:
    """Moments and gradients, put together for every learning rate."""
    found: dict[float, tuple[Moments, list[Tensor]]] = {}
    for moments, gradient in updates:
        empty = Moments(moments.rate, [], [], []), list[Tensor]()
        all_of_rate, gradients = found.setdefault(moments.rate, empty)
        all_of_rate.values.extend(moments.values)
        all_of_rate.means.extend(moments.means)
        all_of_rate.squares.extend(moments.squares)
        gradients.append(gradient)
    yield from found.values()


def _ranges(keys: Iterable[T]) -> Iterator[tuple[T, int, int]]:
    """Runs of equal keys: key, start, stop."""
    start = 0
    for key, run in groupby(keys):
        stop = start + len(list(run))
        yield key, start, stop
        start = stop


def _column_ranges(
    methods: Sequence[Method], width: int, like: Tensor
) -> list[tuple[int, int, Columns | None]]:
    return [
        (start, stop, Columns(kind, stop - start, width, like) if kind else None)
        for kind, start, stop in _ranges(method.columns for method in methods)
    ]
