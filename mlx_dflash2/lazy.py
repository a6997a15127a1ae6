"""Public names of a package that are imported when they are first used.

A command loads a fast BLAS before MLX, so importing the package must not import MLX.
"""

import importlib
import sys
from collections.abc import Callable, Mapping
from typing import Any


def lazy_names(package: str, modules: Mapping[str, str]) -> Callable[[str], Any]:
    """Make the ``__getattr__`` of a package.

    Args:
        package (str): The package's ``__name__``.
        modules (mapping of str to str): The module of each public name, relative to the package. A
            module of the package itself can be a public name, too.
    """

    def get(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module = importlib.import_module(modules[name], package)
        # A public module stands for itself.
        value = getattr(module, name, module)
        setattr(sys.modules[package], name, value)
        return value

    return get
