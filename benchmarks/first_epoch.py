"""`python -m benchmarks.first_epoch PROVIDER DATASET [DATA_DIR]` prints the seconds of the first
epoch of a GCN in a new process, including what libraries load on first use."""

import sys
import time

from metselect_dgl.data import load_dataset

from .models import PROVIDERS, Epochs, Size

if __name__ == "__main__":
    provider, *where = sys.argv[1:]
    epoch = Epochs(PROVIDERS[provider], Size(), load_dataset(*where))
    start = time.perf_counter()
    epoch()
    print(time.perf_counter() - start)
