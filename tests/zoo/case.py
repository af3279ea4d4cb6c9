"""What one proof is about: a class, a tiny configuration, inputs; the configurations deployed."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from shardc.loaders.prove import randomise


class Draw:
    """Inputs for one forward: the same ones for the whole model and for every rank."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        self.dtype = dtype
        self._generator = torch.Generator().manual_seed(1)

    def noise(self, *shape: int) -> torch.Tensor:
        """Normal, in the model's dtype."""
        return torch.randn(*shape, generator=self._generator).to(self.dtype)

    def times(self, *shape: int) -> torch.Tensor:
        """Timesteps or guidance: a thousand times these is exact in bf16, too."""
        return torch.tensor([0.125, 0.25, 0.5])[self.ids(3, *shape)].to(self.dtype)

    def ids(self, high: int, *shape: int) -> torch.Tensor:
        """int64 from 0 to `high` - 1."""
        return torch.randint(0, high, shape, generator=self._generator)


@dataclass(frozen=True)
class Case:
    """One configuration of a class that is proven on 2 ranks and on more.

    config: keyword arguments of a diffusers class, or of a transformers class's config.
    inputs: the forward's keyword arguments. option: what sets this case apart from the class's
    first one. ranks: degrees to run at. padded: degrees that do not divide its heads, to run at
    with zero heads. bf16: False where its library itself cannot run it in bf16.
    """

    class_name: str
    config: Mapping[str, Any]
    inputs: Callable[[Draw], dict[str, Any]]
    option: str = ""
    library: str = "diffusers"
    ranks: tuple[int, ...] = (2, 4)
    padded: tuple[int, ...] = ()
    bf16: bool = True

    @property
    def name(self) -> str:
        return f"{self.class_name} {self.option}".strip()

    def build(self) -> Any:
        """The model, fp32, eval, every parameter random."""
        library: Any = importlib.import_module(self.library)
        cls = getattr(library, self.class_name)
        torch.manual_seed(0)
        if self.library == "diffusers":
            model = cls(**self.config)
        else:
            model = cls(cls.config_class(**self.config))
        randomise(model)
        return model


@dataclass(frozen=True)
class Published:
    """The configuration of weights that people deploy; `repo` names them on the Hub."""

    repo: str
    class_name: str
    config: Mapping[str, Any]
    library: str = "diffusers"


@cache
def _families() -> tuple[Any, ...]:
    import tests.zoo as package

    names = sorted(module.name for module in pkgutil.iter_modules(package.__path__))
    found = [importlib.import_module(f"tests.zoo.{n}") for n in names if n != "__main__"]
    return tuple(module for module in found if hasattr(module, "CASES"))


def cases() -> Iterator[Case]:
    """Every case, family by family."""
    for family in _families():
        yield from family.CASES


def published() -> Iterator[Published]:
    """Every published configuration, family by family."""
    for family in _families():
        yield from getattr(family, "PUBLISHED", ())


def by_name(name: str) -> Case:
    return next(case for case in cases() if case.name == name)
