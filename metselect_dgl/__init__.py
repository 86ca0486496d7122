"""MetSelect on DGL: choose for every node the GNN layer that is most sure of its class."""

from importlib import import_module

__version__ = "0.1.0"
__all__ = ["__version__", "data", "functional", "nn"]


def __getattr__(name: str):
    """Submodules on first use: importing the package alone loads neither DGL nor a kernel."""
    if name in __all__:
        return import_module(f".{name}", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
