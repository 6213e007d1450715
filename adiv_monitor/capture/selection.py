"""Which layers of a model are measured, which parameters of theirs, and why the others are not."""

from collections import Counter
from collections.abc import Callable, Collection, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from adiv_monitor.features.registry import Rule, find_rule

LayerChoice = Sequence[str] | Callable[[str, nn.Module], bool] | None

_WRAPPERS = (
    "_orig_mod",
    "_fsdp_wrapped_module",
    "_checkpoint_wrapped_module",
    "_forward_module",  # Fabric
)
_PARALLEL = (nn.DataParallel, nn.parallel.DistributedDataParallel)


@dataclass(frozen=True)
class Layer:
    """A module that can be measured.

    Attributes:
        path: the module's path in the model, without the names of wrappers.
        module: the module.
        rule: how it is linear in its parameters.
        weight: the weight, if this optimizer trains it.
        bias: the bias, if this optimizer trains it.
        shared: one of these parameters is a parameter of another module too (tied weights).
    """

    path: str
    module: nn.Module
    rule: Rule
    weight: nn.Parameter | None
    bias: nn.Parameter | None
    shared: bool = False

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The trained ones, weight first; never empty."""
        return [p for p in (self.weight, self.bias) if p is not None]


@dataclass(frozen=True)
class Selection:
    """The layers to measure, and the reason for every other module that was asked for.

    Attributes:
        layers: the layers to measure.
        unsupported: module or parameter → why it can't be.
        trained: the parameters that the step trains. What is trainable is read now, because it may
            be switched off when the report is made.
        names: id → name, of the parameters that were asked for.
    """

    layers: list[Layer]
    unsupported: dict[str, str]
    trained: list[Tensor]
    names: dict[int, str]

    def unmeasured(self, measured: Container[str]) -> dict[str, int]:
        """Elements of the trained parameters that were asked for and lie in no measured layer."""
        return {
            self.names[id(p)]: _elements(p) for p in self._outside(measured) if id(p) in self.names
        }

    def coverage(self, measured: Container[str]) -> float:
        """Share of the trained elements that lie in the measured layers, 0 to 1."""
        whole = sum(map(_elements, self.trained))
        missing = sum(map(_elements, self._outside(measured)))
        return (whole - missing) / whole if whole else 0.0

    def _outside(self, measured: Container[str]) -> list[Tensor]:
        layers = (layer for layer in self.layers if layer.path in measured)
        inside = {id(p) for layer in layers for p in layer.parameters}
        return [p for p in self.trained if id(p) not in inside]


def named_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """All modules; paths without what DDP, compile, FSDP, checkpoint and Fabric wrappers add."""
    for path, module in model.named_modules():
        parts, parent = [], model
        for part in path.split(".") if path else ():
            added = part in _WRAPPERS or (part == "module" and isinstance(parent, _PARALLEL))
            if not added:
                parts.append(part)
            parent = getattr(parent, part)
        yield ".".join(parts), module


def trainable(model: nn.Module) -> list[nn.Parameter]:
    """Every trainable parameter of the model, tied ones once."""
    return [p for p in model.parameters() if p.requires_grad]


def select(model: nn.Module, held: Mapping[int, Tensor] | None, choice: LayerChoice) -> Selection:
    """Sort the modules that have trainable parameters of their own.

    Args:
        model: the model.
        held: by id, the parameters that the optimizer holds; None: all are looked at.
        choice: glob patterns over module paths, a predicate, or None for every module.
    """
    layers: list[Layer] = []
    unsupported: dict[str, str] = {}
    names: dict[int, str] = {}
    uses = Counter(id(p) for module in model.modules() for p in module._parameters.values())
    for path, module in named_modules(model):
        own = {n: p for n, p in module._parameters.items() if p is not None and p.requires_grad}
        if not own or not is_chosen(path, module, choice):
            continue
        for name, parameter in own.items():
            names.setdefault(id(parameter), f"{path}.{name}" if path else name)
        found = _layer(path, module, own, held)
        if isinstance(found, str):
            unsupported[path] = found
            continue
        shared = any(uses[id(p)] > 1 for p in found.parameters)
        layers.append(replace(found, shared=shared))
        for name in own.keys() - {found.rule.weight, found.rule.bias}:
            unsupported[f"{path}.{name}"] = f"the rule for {found.rule.kind} layers has no {name}"
    for index, tensor in enumerate(held.values() if held and choice is None else ()):
        if tensor.requires_grad and id(tensor) not in names:
            names[id(tensor)] = path = f"optimizer parameter {index}"
            unsupported[path] = "the optimizer trains it, but it is not in the monitored model"
    stepped = trainable(model) if held is None else held.values()
    trained: list[Tensor] = [p for p in stepped if p.requires_grad]
    return Selection(layers, unsupported, trained, names)


def is_chosen(path: str, module: nn.Module, choice: LayerChoice) -> bool:
    """Whether the patterns or the predicate take the module at this path."""
    if choice is None:
        return True
    if callable(choice):
        return bool(choice(path, module))
    return any(fnmatchcase(path, pattern) for pattern in choice)


def _layer(
    path: str, module: nn.Module, own: dict[str, nn.Parameter], held: Collection[int] | None
) -> Layer | str:
    trained = {name: p for name, p in own.items() if held is None or id(p) in held}
    if not trained:
        return "the optimizer holds none of its parameters"
    rule = find_rule(module)
    if isinstance(rule, str):
        return f"{type(module).__module__}.{type(module).__qualname__}: {rule}"
    for name in (rule.weight, rule.bias):
        if name not in module._parameters and isinstance(getattr(module, name, None), Tensor):
            return f"its {name} is computed from other parameters (a parametrization)"
    for name, parameter in trained.items():
        reason = _unusable(parameter)
        if reason:
            return f"its {name} {reason}"
    if not trained.keys() & {rule.weight, rule.bias}:
        names = ", ".join(trained)
        return (
            f"its rule knows the parameters {rule.weight} and {rule.bias}, but it has {names}: "
            f'name them in register_features({type(module).__name__}, weight="…", bias="…")'
        )
    return Layer(path, module, rule, trained.get(rule.weight), trained.get(rule.bias))


def _elements(parameter: Tensor) -> int:
    return 0 if is_lazy(parameter) else parameter.numel()


def _unusable(parameter: Tensor) -> str | None:
    if is_lazy(parameter):
        return "has no shape yet: the layer is lazy and has not run"
    if type(parameter.data) is not Tensor:
        return f"is a {type(parameter.data).__name__}, of which one process sees only a part"
    if not parameter.is_floating_point():
        return f"is {parameter.dtype}: only real floating-point parameters are measured"
    if parameter.is_meta:
        return "is on the meta device"
    return None
