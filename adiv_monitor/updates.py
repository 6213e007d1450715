"""The three vectors of the parameter step: gradient γ, optimizer's update u, applied a.

Of all layers together, parameter by parameter. Keeping all three until the next forward pass takes
three copies of the parameters. That is only needed where something changes the weights after the
step; elsewhere a = u, which the norm of θ − θ before, taken again, proves. So the first measured
step keeps everything, and what it sees decides (`Watch`).
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from adiv_monitor import dots
from adiv_monitor.features.rows import exact

# Smaller parameters go through one operation for all of them, and their products to the host whole.
_SMALL = 8_192
_STRETCHES, _STRETCH = 64, 256

# By name, by id of the parameter: numbers that add up to a dot product. `a_b` is ⟨a, b⟩, with
# w = −u, what the step took away.
Products = dict[str, dict[int, Tensor]]


@dataclass
class Watch:
    """What this training run was seen to do; until the first step tells, anything is possible.

    Attributes:
        gradient_changes: the optimizer changes `.grad` during its step, so γ must be copied.
        weights_change: the weights change after the step, so a differs from u.
        learnt: a first step was measured.
        distrusted: layers whose gradient was once more than ΦᵀG of their rows.
        idle: layers that had idle rows.
    """

    gradient_changes: bool = True
    weights_change: bool = True
    learnt: bool = False
    distrusted: set[str] = field(default_factory=set)
    idle: set[str] = field(default_factory=set)

    def learn(self, *, gradient_changed: bool, weights_changed: bool) -> None:
        """Once seen, a habit is expected ever after; what the first step lacks is not expected."""
        if not self.learnt:
            self.gradient_changes = self.weights_change = False
            self.learnt = True
        self.gradient_changes |= gradient_changed
        self.weights_change |= weights_changed

    def expects_idle(self, path: str) -> bool:
        """Whether rows of this layer may be idle, so that its mean feature is the sample's."""
        return not self.learnt or path in self.idle


class ParameterSteps:
    """γ, u and a of all trained parameters around one optimizer step.

    Args:
        parameters: every measured parameter, once.
        watch: what this run was seen to do so far.
        copy_gradient: the optimizer will write into `.grad` (it unscales AMP gradients itself).
    """

    def __init__(
        self, parameters: Iterable[nn.Parameter], watch: Watch, *, copy_gradient: bool = False
    ) -> None:
        self._parameters = list(parameters)
        self._keep_update = watch.weights_change
        # Until the next forward pass `.grad` may be zeroed, so then too γ has to be a copy.
        keep_gradient = copy_gradient or watch.gradient_changes or watch.weights_change
        self._small = [p for p in self._parameters if p.numel() <= _SMALL]
        self._large = [p for p in self._parameters if p.numel() > _SMALL]
        self._before = dict(self._copies([p.detach() for p in self._parameters]))
        grads = [gradient(p) for p in self._parameters]
        kept = self._copies(grads, all_of_them=keep_gradient)
        self._gamma = dict(kept)
        self._grads = grads
        self._seen = _some(grads)
        self.has_copies = keep_gradient
        self._update: dict[int, Tensor] = {}
        self.products: Products = defaultdict(dict)
        self._multiply("gamma_gamma", self._gamma.__getitem__, self._gamma.__getitem__)

    def _copies(
        self, tensors: Sequence[Tensor], *, all_of_them: bool = True
    ) -> Iterable[tuple[int, Tensor]]:
        """By id of the parameter; the small ones in one operation."""
        pairs = dict(zip(map(id, self._parameters), tensors, strict=True))
        small = [pairs[id(p)] for p in self._small]
        if small:
            yield from zip(map(id, self._small), torch._foreach_mul(small, 1.0), strict=True)
        for p in self._large:
            yield id(p), pairs[id(p)].clone() if all_of_them else pairs[id(p)]

    def stepped(self) -> None:
        """The optimizer has stepped: what it took away of the small parameters."""
        self._update.update(self._taken_from(self._small))

    def taken(self, parameter: nn.Parameter) -> Tensor:
        """What the step took away, w = θ before − θ, in the precision of the measures."""
        key = id(parameter)
        if key not in self._update:
            taken = exact(self._before[key]) - exact(parameter.detach())
            if not self._keep_update:
                return taken
            self._update[key] = taken
        return self._update[key]

    def take_products(self, parameter: nn.Parameter, taken: Tensor) -> None:
        """⟨w, w⟩ and ⟨w, γ⟩ of a large parameter, from a difference that is then used up."""
        key = id(parameter)
        if parameter.numel() <= _SMALL or key in self.products["w_w"]:
            return
        self.products["w_w"][key] = dots.norms(taken).square()
        spare = taken.clone() if self._keep_update else taken
        self.products["w_gamma"][key] = _sums(spare.mul_(self._gamma[key]))

    def finish_update(self) -> Tensor:
        """All layers have their part: the small ones' products; has `.grad` changed meanwhile?

        By value: version counters miss what is done through .data or by fused kernels.
        """
        for name, other in (("w_w", self._update), ("w_gamma", self._gamma)):
            self._multiply(name, self._update.__getitem__, other.__getitem__, only_small=True)
        changed = _any_differs(_some(self._grads), self._seen)
        self._grads, self._seen = [], []
        if not self._keep_update:
            self._gamma.clear()
            self._update.clear()
        return changed

    def applied(self) -> None:
        """The next forward begins: a's products, or where a = u is expected, ‖a‖² alone."""
        applied = dict(self._taken_from(self._small))
        for p in self._large:
            before = self._before[id(p)]
            exactly = exact(before)
            applied[id(p)] = torch.sub(exactly, exact(p.detach()), out=exactly)
            if not self._keep_update:
                self.products["a_a"][id(p)] = dots.norms(applied[id(p)]).square()
        self._multiply(
            "a_a", applied.__getitem__, applied.__getitem__, only_small=not self._keep_update
        )
        if self._keep_update:
            self._multiply("a_w", applied.__getitem__, self._update.__getitem__)
            self._multiply("a_gamma", applied.__getitem__, self._gamma.__getitem__)
        self._before.clear()
        self._gamma.clear()
        self._update.clear()

    def _taken_from(self, small: list[nn.Parameter]) -> Iterable[tuple[int, Tensor]]:
        if not small:
            return ()
        before = [exact(self._before[id(p)]) for p in small]
        now = [exact(p.detach()) for p in small]
        return zip(map(id, small), torch._foreach_sub(before, now), strict=True)

    def _multiply(
        self,
        name: str,
        a: Callable[[int], Tensor],
        b: Callable[[int], Tensor],
        *,
        only_small: bool = False,
    ) -> None:
        small = [id(p) for p in self._small]
        if small:
            pairs = [exact(a(key)) for key in small], [exact(b(key)) for key in small]
            self.products[name].update(zip(small, torch._foreach_mul(*pairs), strict=True))
        if only_small:
            return
        for key in (id(p) for p in self._large):
            x, y = a(key), b(key)
            self.products[name][key] = (
                dots.norms(x).square() if x is y else _sums(exact(x) * exact(y))
            )


def gradient(parameter: nn.Parameter) -> Tensor:
    """∂L/∂θ as it stands in `.grad`; zeros where there is none."""
    if parameter.grad is None:
        return torch.zeros_like(parameter)
    return parameter.grad.detach()


def some(tensor: Tensor) -> Tensor:
    """All entries, or 16,384 in evenly spaced stretches: lone ones would touch every cache line."""
    flat = _flat_in_memory(tensor)
    if len(flat) <= _STRETCHES * _STRETCH:
        return flat
    return flat.as_strided(
        (_STRETCHES, _STRETCH), (len(flat) // _STRETCHES, 1), flat.storage_offset()
    )


def _flat_in_memory(tensor: Tensor) -> Tensor:
    """All entries in the order in which they lie in memory: a view, if they lie together."""
    if tensor.is_contiguous():
        return tensor.view(-1)
    order = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
    return tensor.permute(order).reshape(-1).contiguous()


def _some(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Copies of some entries of all tensors, one for each type and device."""
    kinds: dict[object, list[Tensor]] = defaultdict(list)
    for tensor in tensors:
        kinds[tensor.dtype, tensor.device].append(some(tensor).reshape(-1))
    return [torch.cat(parts) for parts in kinds.values()]


def _any_differs(a: list[Tensor], b: list[Tensor]) -> Tensor:
    # NaN is equal to itself here: bits are compared.
    flags = [
        (x.view(_INTEGERS[x.element_size()]) != y.view(_INTEGERS[y.element_size()])).any()
        for x, y in zip(a, b, strict=True)
    ]
    return torch.stack([flag.to(flags[0].device) for flag in flags]).any()


_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _sums(tensor: Tensor) -> Tensor:
    """Numbers that add up to the sum of all entries."""
    return tensor.sum().reshape(1)


def weight_norms(parameters: Sequence[nn.Parameter]) -> list[Tensor]:
    """‖θ‖ of every parameter: tells whether an optimizer moved them."""
    return list(torch._foreach_norm([p.detach() for p in parameters])) if parameters else []
