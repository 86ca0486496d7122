"""`python -m metselect_dgl ...` is `metselect ...`."""

import sys

from .cli import main

sys.exit(main())
