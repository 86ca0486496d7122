"""One file per convolution: as a DGL module, on edges and on blocks."""
