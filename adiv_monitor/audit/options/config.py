"""Settings of an audit: options of the command line, which are also the keys of a YAML file."""

import inspect
import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields
from difflib import get_close_matches
from pathlib import Path
from typing import Any, get_args, get_type_hints

from adiv_monitor.audit.options.fail_if import parse
from adiv_monitor.audit.options.usage import UsageError, needed, one_line
from adiv_monitor.diagnosis.hidden import without_secrets

# Lightning's names; float16 needs a scaled loss, which the audit's loop does not have.
PRECISIONS = ("32-true", "64-true", "bf16-true", "bf16-mixed")

Arguments = Mapping[str, Any]


@dataclass(frozen=True)
class Config:
    """The model, the settings of its audit, and the place of the report.

    Names, types, defaults and these descriptions are those of the command line and of YAML files.

    Attributes:
        model: import path of a torch.nn.Module class, of a function that returns a module, or of
            an instance (torchvision.models.resnet18, my_project.train:build, train.py:model);
            timm:NAME; or hf:PATH of a config.json of transformers, or of its folder. Building it
            runs its code.
        run_script: let code that is imported or called for the model, the data, the loss and the
            optimizer train and write over files of this folder; weights that it trained are
            audited as such
        model_args: arguments of the class or function as JSON; values that look like secrets
            (api_key, password, token) are in no file of the report
        checkpoint: file of weights: .safetensors, or a state dict by torch.save
        trust_checkpoint: load a pickle that runs code; only from people you trust; not an option
            of --config
        data: random (learnable), digits, cifar10:ROOT, imagefolder:DIR, text:FILE, or
            package.module:function, called without arguments, for an iterable of batches:
            (inputs…, target), or dicts of the model's arguments
        download: fetch CIFAR-10 into ROOT if it is not there
        input_shape: shape of one sample (3,64,64), for data other than your own; by default that
            of a model of torchvision, timm or transformers, or of the data
        num_classes: number of classes of random data; by default the number of the model's
            outputs, at most 10. To change the model's outputs, use --model-args
        batch_size: number of samples in a batch
        loss: cross_entropy, nll, mse, l1, smooth_l1, huber, binary_cross_entropy_with_logits; or
            the import path of a loss class, or of a function (output, target) or (model, batch) →
            scalar. By default cross_entropy for targets that are whole numbers, else mse; models
            of transformers use their own
        optimizer: name in torch.optim, or import path of an optimizer, of its class, or of a
            function model → optimizer
        optimizer_args: arguments of the optimizer as JSON, such as '{"lr": 0.1}'
        clip_norm: clip the gradient to this norm
        steps: number of steps to train a copy for
        seed: seed of initial weights, data and training
        device: cpu, cuda, cuda:1, mps …; by default cuda if available
        precision: 32-true, 64-true, bf16-true, bf16-mixed
        realised: also measure the actual change of the activations in each step, with all layers
            moved; costs two forward passes
        attention: also measure attention scores
        alignment: also measure the alignment of weights, updates and activations, on the first
            batch
        try_fixes: try the first fixes in short runs before recommending them (on by default)
        try_seconds: begin no trial that would end later than this many seconds after the first;
            the report says if that left a trial out. Otherwise the number of trials follows from
            steps and model, not from a clock
        losses: file of losses of the first steps of your own run: a JSON list, a metrics.csv of
            Lightning's CSVLogger, or a trainer_state.json; the verdict says if the copy behaves
            otherwise
        fail_if: exit with code 1 if this rule holds: '[LAYERS:] MEASURE > NUMBER' (or >=, <, <=)
            at any layer and measured step, by more than two standard errors ('encoder.*:
            update_cosine < 0'); the name of a finding (rate-too-high); or the least strength of a
            finding (act). May be repeated
        out: folder of the report
    """

    model: str = ""
    run_script: bool = False
    model_args: Arguments = field(default_factory=dict)
    checkpoint: str | None = None
    trust_checkpoint: bool = False
    data: str = "random"
    download: bool = False
    input_shape: tuple[int, ...] | None = None
    num_classes: int | None = None
    batch_size: int = 16
    loss: str | None = None
    optimizer: str = "AdamW"
    optimizer_args: Arguments = field(default_factory=dict)
    clip_norm: float | None = None
    steps: int = 60
    seed: int = 0
    device: str | None = None
    precision: str = "32-true"
    realised: bool = False
    attention: bool = False
    alignment: bool = False
    try_fixes: bool = True
    try_seconds: float = math.inf
    losses: str | None = None
    fail_if: tuple[str, ...] = ()
    out: str = "adiv-audit"


ARGUMENTS = ("model_args", "optimizer_args")
NAMING = ("model", "data", "loss", "optimizer")  # these may be import paths
# Option, as users write it → field.
NAMES = {f.name.replace("try_fixes", "try"): f.name for f in fields(Config)}
DEFAULTS = asdict(Config())
HELP = {
    name: " ".join(text.split())
    for name, text in re.findall(
        r"^    (\w+): (.*(?:\n {8}.*)*)", inspect.getdoc(Config) or "", re.MULTILINE
    )
}


def _expected(form: str, is_right: Callable[[Any], bool], value: Any) -> Any:
    if not is_right(value):
        raise ValueError(form)
    return value


def _text(value: Any) -> Any:
    return _expected("text", lambda x: isinstance(x, str) and x != "", value)


def _flag(value: Any) -> Any:
    return _expected("true or false", lambda x: isinstance(x, bool), value)


def _number(value: Any) -> float:
    try:
        return float("no number" if isinstance(value, bool) else value)
    except (TypeError, ValueError):
        raise ValueError("a number") from None


def _whole(value: Any, least: int = 1) -> int:
    form = f"a whole number of at least {least}"
    try:
        number = _number(value)
    except ValueError:
        raise ValueError(form) from None
    return int(_expected(form, lambda x: x >= least and x % 1 == 0, number))


def _shape(value: Any) -> tuple[int, ...]:
    sizes = re.split(r"[,x×]", value.strip("()[] ")) if isinstance(value, str) else value
    try:
        return tuple(map(_whole, [sizes] if isinstance(sizes, int) else sizes))
    except (TypeError, ValueError):
        raise ValueError("sizes of one sample without the batch, such as 3,64,64") from None


def _arguments(value: Any) -> dict[str, Any]:
    form = """arguments by name as JSON, such as '{"lr": 0.1}'"""
    try:
        found = json.loads(value) if isinstance(value, str) else value
    except ValueError as error:
        raise ValueError(f"{form} ({one_line(error)})") from None
    return dict(_expected(form, lambda x: isinstance(x, Mapping) and all(map(_text, x)), found))


def _rules(value: Any) -> tuple[str, ...]:
    rules = (value,) if isinstance(value, str) else tuple(map(_text, value))
    for rule in rules:
        parse(rule)
    return rules


def _finite(value: Any) -> Any:
    return _expected("a finite number above 0", lambda x: 0 < x < math.inf, _number(value))


def _seconds(value: Any) -> Any:
    return _expected("a number of at least 0", lambda x: x >= 0, _number(value))


def _precision(value: Any) -> Any:
    return _expected(f"one of {', '.join(PRECISIONS)}", PRECISIONS.__contains__, value)


# Readers from text or from a YAML value, by type and, where not every value of the type is meant,
# by name. They raise ValueError with the expected form.
_BY_TYPE: Mapping[Any, Callable[[Any], Any]] = {
    str: _text,
    bool: _flag,
    int: _whole,
    Arguments: _arguments,
    tuple[int, ...]: _shape,
    tuple[str, ...]: _rules,
}
_BY_NAME: Mapping[str, Callable[[Any], Any]] = {
    "clip_norm": _finite,
    "precision": _precision,
    "seed": lambda value: _whole(value, 0),
    "try_seconds": _seconds,
}
_READERS = {
    name: _BY_NAME.get(name) or next(_BY_TYPE[t] for t in (kind, *get_args(kind)) if t in _BY_TYPE)
    for name, kind in get_type_hints(Config).items()
}


def read(given: Mapping[str, Any], where: Callable[[str], str]) -> dict[str, Any]:
    """Return the values of options, checked.

    Args:
        given: option → text of the command line, or a value from YAML.
        where: function from an option's name to the name that its user knows, for errors.

    Raises:
        UsageError: there is no such option, or its value is not as expected.
    """
    values = {}
    for key, value in given.items():
        name = str(key).replace("-", "_")
        if name not in NAMES:
            close = get_close_matches(name, NAMES, 1)
            hint = f"; did you mean {close[0]}?" if close else f"; known are {', '.join(NAMES)}"
            raise UsageError(f"{where(name)}: there is no such option{hint}")
        option = NAMES[name]
        if value is None and DEFAULTS[option] is None:
            continue
        try:
            values[option] = _READERS[option](value)
        except UsageError as error:
            raise UsageError(f"{where(name)}: {error}") from error
        except (ValueError, TypeError) as error:
            raise UsageError(f"{where(name)}: got {one_line(value)!r}, expected {error}") from error
    return values


def load(file: str) -> dict[str, Any]:
    """Return the options in a YAML file.

    Raises:
        UsageError: the file can't be read, or has other content.
    """
    yaml = needed("yaml", "--config")

    class Loader(yaml.SafeLoader):  # type: ignore[misc, name-defined]
        """Reads 1e-3 as a number, which YAML 1.1 reads as text."""

    Loader.add_implicit_resolver(
        "tag:yaml.org,2002:float",
        re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+$"),
        list("-+0123456789"),
    )
    where = f"--config {file}: "
    try:
        content = yaml.load(Path(file).read_text(encoding="utf-8"), Loader)
    except OSError as error:
        raise UsageError(f"{where}can't be read: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UsageError(f"{where}is no YAML: {one_line(error)}") from error
    if not isinstance(content, dict):
        kind = type(content).__name__
        raise UsageError(f"{where}holds a {kind}, expected lines such as steps: 60")
    return read(content, where.__add__)


def dumped(config: Config) -> str:
    """Return the settings as YAML that `load` reads back, without secrets among arguments."""
    yaml = needed("yaml", "config.yaml")
    values = asdict(config)
    values |= {name: without_secrets(values[name]) for name in ARGUMENTS}
    plain = {name: values[option] for name, option in NAMES.items()}
    text: str = yaml.safe_dump(plain, sort_keys=False, allow_unicode=True)
    return text
