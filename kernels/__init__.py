"""Triton kernels, installed as `metselect_dgl.kernels` and imported on first use."""
