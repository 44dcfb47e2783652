"""Names for classes and functions: what a config calls `grpo` is looked up here, or imported by dotted path."""

import importlib
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar, cast

from trinity_lightning.config.values import unknown_name

T = TypeVar("T")
S = TypeVar("S")


def import_object(path: str) -> object:
    """The object at a dotted path such as `my_package.rewards.exact`.

    Raises:
        ValueError: the module or the attribute does not exist; the message says which.
    """
    module_name, _, attribute = path.rpartition(".")
    if not module_name:
        raise ValueError(f"'{path}' is not a dotted path: write 'module.attribute'.")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not (module_name == error.name or module_name.startswith(error.name + ".")):
            raise  # the module exists and one of its own imports fails: that traceback is the answer
        raise ValueError(
            f"cannot import '{path}': there is no module '{error.name}'. "
            "A module of your own must lie in the current folder or on PYTHONPATH."
        ) from error
    if not hasattr(module, attribute):
        names = [name for name in vars(module) if not name.startswith("_")]
        raise ValueError(f"cannot import '{path}': " + unknown_name(f"name in module {module_name}", attribute, names))
    return getattr(module, attribute)


class Registry(Generic[T]):
    """A table from names to classes or functions of one kind.

    Args:
        kind: what is registered, in words, for messages: "add strategy".
    """

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._items: dict[str, T] = {}

    def register(self, name: str) -> Callable[[S], S]:
        """A decorator that files what it decorates under `name`; a name taken already is a ValueError."""

        def decorator(item: S) -> S:  # its own type comes back, so that a class keeps its own signature
            if name in self._items:
                raise ValueError(f"{self.kind} '{name}' is registered already.")
            self._items[name] = cast("T", item)
            return item

        return decorator

    def get(self, name: str) -> T:
        """What is registered under `name`.

        Raises:
            ValueError: unknown name; the message lists the known ones and the nearest match.
        """
        if name not in self._items:
            raise ValueError(unknown_name(self.kind, name, self._items))
        return self._items[name]

    def resolve(self, name: str) -> object:
        """What is registered under `name`, or, where the name has a dot, the object at that dotted path.

        Raises:
            ValueError: unknown name, or nothing to import at that path.
        """
        return import_object(name) if "." in name and name not in self._items else self.get(name)

    def __contains__(self, name: object) -> bool:
        return name in self._items

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)
