"""MetSelect on DGL: choose for every node the GNN layer that is most sure of its class."""

__version__ = "0.1.0"
