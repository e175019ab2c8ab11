"""From the path of a reward function in the config to the function, and to what it must be given."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeVar

from metagrpo.trainer.errors import ConfigError

if TYPE_CHECKING:  # a worker has no use for pydantic
    from metagrpo.trainer.config import RewardFunction

BUILTIN = {
    "math": "metagrpo.trainer.rewards.maths:math_reward",
    "last_number": "metagrpo.trainer.rewards.builtin:last_number",
    "reasoning_gym": "metagrpo.trainer.rewards.gym:reasoning_gym_reward",
    "length_penalty": "metagrpo.trainer.rewards.builtin:length_penalty",
}
BATCH_ARGUMENTS = ("prompts", "completions", "completion_ids")

Function = TypeVar("Function", bound=Callable[..., Any])


def batched(function: Function) -> Function:
    """Mark a reward function that compares completions: it gets all of a step's samples in one call.

    Other functions get one sample a call, so that a bad sample costs no other. Here a failure of the call costs
    the whole batch in this function, and ``reward.timeout`` is the time of the whole call.
    """
    function.batched = True  # type: ignore[attr-defined]
    return function


@dataclass(frozen=True, slots=True)
class RewardSpec:
    """A reward function by name, to be imported in another process.

    Attributes:
        name: names its metrics; unique in a run.
        target: ``module:attribute`` or ``/absolute/file.py:attribute``.
        options: keyword arguments bound to it.
    """

    name: str
    target: str
    options: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Contract:
    """What a function wants.

    Attributes:
        batched: whether it gets all samples in one call.
        required: columns it cannot do without.
        accepted: columns it can be given; ``None`` takes any.
    """

    batched: bool
    required: frozenset[str]
    accepted: frozenset[str] | None

    def check(self, name: str, columns: Sequence[str]) -> None:
        """Compare with the columns that the data has.

        Raises:
            ConfigError: one is missing, or one is there that the function does not take.
        """
        if missing := sorted(self.required.difference(columns)):
            raise ConfigError(
                f"reward {name} needs {', '.join(missing)}: neither an option of it nor a column of the data "
                f"({', '.join(columns) or 'which has none'})"
            )
        if self.accepted is not None and (unknown := sorted(set(columns) - self.accepted)):
            raise ConfigError(
                f"reward {name} is given every column and does not take {', '.join(unknown)}: add **kwargs to it"
            )


def resolve(functions: Sequence[RewardFunction]) -> list[RewardSpec]:
    """Name the functions of a config and make their paths absolute, without importing any.

    A function is named as its built-in or its attribute; the second of one name becomes ``name_2``.

    Raises:
        ConfigError: a path is neither a built-in (the nearest one is named) nor ``module:function``, or its
            file does not exist, or there are none.
    """
    if not functions:
        raise ConfigError("reward.functions is empty: nothing would be rewarded")
    specs: list[RewardSpec] = []
    for function in functions:
        target = _target(function.path)
        base = function.path if function.path in BUILTIN else target.rpartition(":")[2]
        name, count = base, 1
        while any(spec.name == name for spec in specs):
            count += 1
            name = f"{base}_{count}"
        specs.append(RewardSpec(name, target, dict(function.options)))
    return specs


def load(spec: RewardSpec) -> Callable[..., Any]:
    """Import the function.

    Raises:
        ConfigError: the module cannot be imported, or has no such function (the nearest name is given).
    """
    location, _, attribute = spec.target.rpartition(":")
    try:
        module = _import_file(Path(location)) if location.endswith(".py") else importlib.import_module(location)
    except (Exception, SystemExit) as error:
        hint = ""
        if isinstance(error, ModuleNotFoundError) and error.name == location.partition(".")[0]:
            hint = " (a file that is not installed is given as path/to/file.py:function)"
        raise ConfigError(
            f"reward {spec.target}: importing {location} failed: {type(error).__name__}: "
            f"{' '.join(str(error).split())}{hint}"
        ) from error
    function = getattr(module, attribute, None)
    if not callable(function):
        callables = [name for name, value in vars(module).items() if callable(value) and not name.startswith("_")]
        raise ConfigError(
            f"reward {spec.target}: {location} has no function {attribute}" + _nearest(attribute, callables)
        )
    return function


def contract(spec: RewardSpec, function: Callable[..., Any]) -> Contract:
    """Read the function's signature.

    Raises:
        ConfigError: it cannot be called with prompts, completions, completion_ids and the options.
    """
    is_batched = bool(getattr(function, "batched", False))
    try:
        signature = inspect.signature(function)
    except ValueError:  # written in C, and says nothing about itself
        return Contract(is_batched, frozenset(), None)
    try:
        signature.bind_partial(**dict.fromkeys(BATCH_ARGUMENTS), **spec.options)
    except TypeError as error:
        raise ConfigError(
            f"reward {spec.target}: {error}; it is called with {', '.join(BATCH_ARGUMENTS)}, every column of the "
            f"data and its options ({', '.join(spec.options) or 'none'})"
        ) from error
    named = {
        name: parameter
        for name, parameter in signature.parameters.items()
        if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
    }
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in signature.parameters.values())
    given = {*BATCH_ARGUMENTS, *spec.options}
    return Contract(
        is_batched,
        frozenset(name for name, parameter in named.items() if parameter.default is parameter.empty) - given,
        None if takes_any else frozenset(named),
    )


def _target(path: str) -> str:
    if path in BUILTIN:
        return BUILTIN[path]
    location, separator, attribute = path.rpartition(":")
    if not separator or not location or not attribute:
        raise ConfigError(
            f"reward {path!r} is no built-in{_nearest(path, list(BUILTIN))}; a function of your own is "
            "package.module:function or file.py:function"
        )
    if not location.endswith(".py"):
        return path
    file = Path(location).expanduser().absolute()  # a worker may start after a change of directory
    if not file.is_file():
        raise ConfigError(f"reward {path}: there is no file {file}")
    return f"{file}:{attribute}"


def _nearest(name: str, known: Sequence[str]) -> str:
    matches = difflib.get_close_matches(name, known, n=1, cutoff=0.0)
    return f", did you mean {matches[0]}?" if matches else ""


def _import_file(file: Path) -> ModuleType:
    """The module in ``file``, once a process."""
    name = f"metagrpo_reward:{file}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise ImportError(f"{file} is no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # where dataclasses and pickle look their module up
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
