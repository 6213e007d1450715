"""The three vectors of a layer's parameter step: gradient γ, optimizer's update u, applied a.

Keeping all of them until the next forward pass takes three copies of the parameters. That is only
needed where something changes the weights after the step; elsewhere a = u, which a checksum of the
weights proves. So the first measured step keeps everything, and what it sees decides (`Watch`).
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from adiv_monitor import dots
from adiv_monitor.dots import Dots
from adiv_monitor.features.rows import exact

_STRETCHES, _STRETCH = 64, 256
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass
class Watch:
    """What this training run was seen to do; until the first step tells, anything is possible.

    Attributes:
        gradient_changes: the optimizer changes `.grad` during its step, so γ must be copied.
        weights_change: the weights change after the step, so a differs from u.
        learnt: a first step was measured.
    """

    gradient_changes: bool = True
    weights_change: bool = True
    learnt: bool = False

    def learn(self, *, gradient_changed: bool, weights_changed: bool) -> None:
        """Once seen, a habit is expected ever after; what the first step lacks is not expected."""
        if not self.learnt:
            self.gradient_changes = self.weights_change = False
            self.learnt = True
        self.gradient_changes |= gradient_changed
        self.weights_change |= weights_changed


class ParameterStep:
    """γ, u and a of one layer's trained parameters, in parts, around one optimizer step."""

    def __init__(
        self, parameters: list[nn.Parameter], watch: Watch, *, copy_gradient: bool = False
    ) -> None:
        self._parameters = parameters
        self._keep_update = watch.weights_change
        # Until the next forward pass `.grad` may be zeroed, so then too γ has to be a copy.
        keep_gradient = copy_gradient or watch.gradient_changes or watch.weights_change
        self._before = [p.detach().clone() for p in parameters]
        self._gradients = gradients(parameters)
        self._copies = [g.clone() for g in self._gradients] if keep_gradient else []
        # The first step compared every entry; from then on a part of them tells.
        self._sums = [] if keep_gradient else [_bit_sum(some(g)) for g in self._gradients]
        self._checksums: list[Tensor] = []
        self.update: list[Tensor] = []
        self.gamma: list[Tensor] = []
        self.gradient_changed: Tensor | None = None

    @property
    def has_copies(self) -> bool:
        """Whether γ is safe even if the optimizer changes `.grad`."""
        return bool(self._copies)

    def stepped(self) -> None:
        """The optimizer has stepped: u = θ − θ before; γ, if need be from copies."""
        if self._keep_update:
            self.update = self._moved()
        else:
            self.update = self._moved(in_place=True)
            self._before = []
            self._checksums = [checksum(p) for p in self._parameters]
        if self._copies:
            self.gradient_changed = _any_differs(self._gradients, self._copies)
        else:  # by value: version counters miss what is done through .data or by fused kernels
            now = [_bit_sum(some(g)) for g in self._gradients]
            self.gradient_changed = _differ(now, self._sums)
        self.gamma = self._copies or self._gradients
        self._gradients = []

    def _moved(self, *, in_place: bool = False) -> list[Tensor]:
        """θ now − θ before; in place, where the precision allows, of what was kept of before."""
        pairs = [(p.detach(), b) for p, b in zip(self._parameters, self._before, strict=True)]
        return [
            torch.sub(p, b, out=b) if in_place and exact(b) is b else exact(p) - exact(b)
            for p, b in pairs
        ]

    def release(self) -> None:
        """Let go of what the next forward pass does not need."""
        if not self._keep_update:
            self.update, self.gamma = [], []
            self._copies = []

    def products(self) -> Dots:
        """⟨u, u⟩, ⟨u, γ⟩ and ⟨γ, γ⟩."""
        u, gamma = aligned(self.update), aligned(self.gamma)
        return {
            "u_u": dots.of_parts(u, u),
            "u_gamma": dots.of_parts(u, gamma),
            "gamma_gamma": dots.of_parts(gamma, gamma),
        }

    def applied(self) -> tuple[Tensor, Dots]:
        """The next forward begins: have the weights changed, and if all was kept, a's products."""
        if not self._keep_update:
            now = [checksum(p) for p in self._parameters]
            return _differ(now, self._checksums), {}
        a = self._moved()
        changed = _any_differs(a, self.update)
        a, u, gamma = aligned(a), aligned(self.update), aligned(self.gamma)
        return changed, {
            "a_a": dots.of_parts(a, a),
            "a_u": dots.of_parts(a, u),
            "a_gamma": dots.of_parts(a, gamma),
        }


def _differ(a: list[Tensor], b: list[Tensor]) -> Tensor:
    return a[0] != b[0] if len(a) == 1 else (torch.stack(a) != torch.stack(b)).any()


def _any_differs(a: list[Tensor], b: list[Tensor]) -> Tensor:
    pairs = zip(a, b, strict=True)
    return torch.stack([((x != y) & ~(x.isnan() & y.isnan())).any() for x, y in pairs]).any()


def gradients(parameters: list[nn.Parameter]) -> list[Tensor]:
    """`.grad` of every parameter; zero where there is none."""
    return [torch.zeros_like(p) if p.grad is None else p.grad.detach() for p in parameters]


def some(tensor: Tensor) -> Tensor:
    """All entries, or 16,384 in evenly spaced stretches: lone ones would touch every cache line."""
    flat = _flat_in_memory(tensor)
    if len(flat) <= _STRETCHES * _STRETCH:
        return flat
    return flat.as_strided((_STRETCHES, _STRETCH), (len(flat) // _STRETCHES, 1))


def checksum(tensor: Tensor) -> Tensor:
    """Sum of all bits read as integers: tells any change but those that cancel."""
    return _bit_sum(_flat_in_memory(tensor))


def _bit_sum(flat: Tensor) -> Tensor:
    """Sum of the bits of a tensor whose last dimension lies together in memory."""
    fit = 8 // flat.element_size()
    where = (*flat.stride()[:-1], flat.shape[-1], flat.storage_offset())
    fits = all(number % fit == 0 for number in where)
    # As few and as wide integers as fit.
    return flat.view(torch.int64 if fits else _INTEGERS[flat.element_size()]).sum()


def _flat_in_memory(tensor: Tensor) -> Tensor:
    """All entries in the order in which they lie in memory: a view, if they lie together."""
    if tensor.is_contiguous():
        return tensor.view(-1)
    order = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
    return tensor.permute(order).reshape(-1).contiguous()


def aligned(parts: list[Tensor]) -> list[Tensor]:
    """Parts as vectors for dot products, in the precision of the measures."""
    return [exact(part).reshape(-1) for part in parts]
