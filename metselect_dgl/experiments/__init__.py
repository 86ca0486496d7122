"""Experiments: the demo, comparisons over splits, the paper's studies, and explanations."""
