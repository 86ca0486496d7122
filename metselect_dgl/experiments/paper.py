"""The paper's own numbers."""

# Seconds of an epoch on ogbn-arxiv, Table "Mean time taken": Tesla V100-SXM2 32 GB.
EPOCH_SECONDS = {
    "GCN": {"FinalSelect": 0.59, "NDLSelect": 1.07, "MetSelect": 1.41},
    "GAT": {"FinalSelect": 0.81, "NDLSelect": 1.22, "MetSelect": 1.05},
    "GIN": {"FinalSelect": 0.59, "NDLSelect": 0.98, "MetSelect": 1.50},
}
