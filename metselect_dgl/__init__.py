"""MetSelect on DGL: select a GNN layer for every node by Mahalanobis class distances."""

from importlib import import_module

__version__ = "0.1.0"
__all__ = ["__version__", "data", "functional", "nn", "pyg"]


def __getattr__(name: str):
    """Import a submodule on first use: the package alone loads neither DGL nor kernels."""
    if name in __all__:
        return import_module(f".{name}", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
