"""Hides AVX-512 and AMX from what asks torch for the CPU's abilities, in every process with this folder on its path.

Libraries that ask the CPU themselves (oneDNN, MKL, torch's own kernels) have variables of their own for this; torch's
answer to others, by which vLLM chooses its kernels, has none. `make test-avx2` sets them all.
"""

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Sequence
from types import MappingProxyType, ModuleType
from typing import Any

HIDDEN = ("avx512", "avx10", "avx_", "amx")


def _hide(cpu: Any) -> None:
    capabilities = {
        name: False if name.startswith(HIDDEN) else ability for name, ability in cpu.get_capabilities().items()
    }
    cpu.get_capabilities = lambda: MappingProxyType(capabilities)


class _Finder(importlib.abc.MetaPathFinder):
    """Finds `torch.cpu` as usual, and hides abilities when it has been imported."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != "torch.cpu":
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            loader: Any = spec.loader
            execute = loader.exec_module

            def exec_module(module: ModuleType) -> None:
                execute(module)
                _hide(module)

            loader.exec_module = exec_module
        return spec


sys.meta_path.insert(0, _Finder())
