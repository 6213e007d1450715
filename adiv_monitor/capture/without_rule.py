"""Parameters without a rule, and the modules through which they are measured, each as a whole."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from adiv_monitor.capture.selection import Layer, Selection
from adiv_monitor.features.features import JacobianFeatures
from adiv_monitor.features.rows import Rows, compute_dtype
from adiv_monitor.features.uses import Refused, Use
from adiv_monitor.rerun.derivatives import pattern, tolerance
from adiv_monitor.rerun.nested import tensors_in
from adiv_monitor.rerun.surroundings import Randomness
from adiv_monitor.rerun.twin import Arguments, Twin

_ADVICE = "register_features adds a rule for its class"


class ParametersWithoutRule:
    """Finds the parameters without a rule that must be measured through a module that has run.

    These are the parameters that an output depends on although no rule accounts for them: a
    function without a rule, or none that is visible, took them. Each one goes to the innermost
    module that ran and holds it at any depth.

    Args:
        selection: the parameters to measure.
        known: layers that are known to account for their parameters.

    Attributes:
        unmeasured: id of a parameter → the reason why its use can't be measured.
    """

    def __init__(self, selection: Selection, known: Iterable[Layer] = ()) -> None:
        self.unmeasured: dict[int, str] = {}
        self._accounted = {id(p) for layer in known for p in layer.parameters}
        for module in selection.rules:
            self._accounted |= {id(p) for p in module._parameters.values() if p is not None}
        self._held = selection.below
        self._claims: dict[int, set[nn.Module]] = defaultdict(set)

    def account(self, keys: Iterable[int]) -> None:
        """Record that a rule accounts for a use of the parameters with these ids."""
        self._accounted.update(keys)

    def refuse(self, keys: Iterable[int], reason: str) -> None:
        """Record why the parameters with these ids can't be measured."""
        self.unmeasured |= dict.fromkeys(keys, reason)

    def may_be_in(self, module: nn.Module) -> bool:
        """Return whether the module may hold parameters without a rule at any depth."""
        return not self._held[module] <= self._accounted

    def claim(self, module: nn.Module, z: Tensor, inputs: Sequence[Tensor]) -> list[str]:
        """Return the names, in the module, of the parameters to be measured through its output."""
        left = self._held[module] - self.unmeasured.keys() - self._accounted
        if not self._claims.keys().isdisjoint(left):  # claimed by modules inside this one
            below = set(module.modules()) - {module}
            left = {key for key in left if below.isdisjoint(self._claims.get(key, ()))}
        found = left & _leaves_of(z, inputs) if left else left
        for key in found:
            self._claims[key].add(module)
        return [name for name, p in module.named_parameters() if id(p) in found] if found else []

    def use(
        self,
        module: nn.Module,
        names: Sequence[str],
        arguments: Arguments,
        place: int,
        z: Tensor,
        random: Randomness,
    ) -> Use:
        """Return how the rows of a module's output move with some of its parameters.

        The module's forward has just run; it must give the same output when it runs again.

        Args:
            module: the module.
            names: the names of the parameters.
            arguments: the arguments of the forward.
            place: the place of z among the tensors of its output.
            z: z.
            random: the state of the random numbers at the beginning of the forward.
        """
        every_row = partial(rows_of, module)

        def features(rows: Rows) -> JacobianFeatures:
            moving = {name: module.get_parameter(name) for name in names}
            sizes = [p.numel() for p in moving.values()]
            expected = rows.take(every_row(z))
            tried = pattern(expected.new_empty(sum(sizes), dtype=compute_dtype(expected)))

            def run(vector: Tensor) -> list[Tensor]:
                """Return the rows of z, and their J_Θ(z) ΔΘ for ΔΘ as one vector."""
                parts = zip(moving.items(), torch.split(vector, sizes), strict=True)
                tangents = {name: part.view_as(p) for (name, p), part in parts}
                found = twin.jvp(tangents, lambda output: every_row(tensors_in(output)[place]))
                return [rows.take(x) for x in found]

            try:
                twin = Twin(module, arguments, random)
                away, length = map(torch.linalg.vector_norm, (run(tried)[0] - expected, expected))
                precision = max(twin.precision, torch.finfo(z.dtype).eps)
                if not away <= tolerance(precision) * length:
                    raise RuntimeError(
                        f"it returned another output (off by {away:.2g} of {length:.2g}): a hook "
                        "changes it, or it changes its input, a buffer, a frozen parameter or "
                        "another state, or draws random numbers from other generators than torch's"
                    )
            except Exception as error:
                why = f"its forward can't be run again with derivatives: {error}".splitlines()[0]
                raise Refused(f"{why}; {_ADVICE}") from error
            return JacobianFeatures(lambda vector: run(vector)[1])

        return Use("module", None, None, features, every_row)


def rows_of(module: nn.Module, z: Tensor) -> Tensor:
    """Return a module's output (batch, …, channels), of which all positions are rows.

    The channels are before the places of a convolution, and last in a linear map. Of other modules,
    they are in the second dimension of images and volumes, with four and five dimensions.
    """
    if z.dim() < 2:
        return z.reshape(-1, 1)
    if isinstance(module, _ConvNd):
        return z.movedim(-1 - len(module.kernel_size), -1)
    return z.movedim(1, -1) if z.dim() in (4, 5) and not isinstance(module, nn.Linear) else z


def place_of_z(output: Any, inputs: Iterable[Tensor]) -> int | None:
    """Return which tensor of a module's output is its z: the only one with a gradient.

    Scalars count only if there is nothing else, inputs not at all. With several there is no z.
    """
    given, every = set(map(id, inputs)), tensors_in(output)
    trained = {
        id(x): place
        for place, x in enumerate(every)
        if x.requires_grad and x.is_floating_point() and id(x) not in given
    }
    places = [place for place in trained.values() if every[place].dim()] or [*trained.values()]
    return places[0] if len(places) == 1 else None


def _leaves_of(tensor: Tensor, inputs: Iterable[Tensor]) -> set[int]:
    """Return ids of the leaves that a tensor is computed from other than through the inputs."""
    seen: set[Any] = {tensor.grad_fn for tensor in inputs}
    waiting: list[Any] = [tensor.grad_fn]
    leaves = set()
    while waiting:
        node = waiting.pop()
        if node is not None and node not in seen:
            seen.add(node)
            waiting += [above for above, _ in node.next_functions]
            leaves.add(id(getattr(node, "variable", None)))
    return leaves
