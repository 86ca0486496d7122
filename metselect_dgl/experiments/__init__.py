"""What people run: the demo, comparisons over splits, and the explanation of one node."""
