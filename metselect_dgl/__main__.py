"""Run `metselect` as `python -m metselect_dgl`."""

import sys

from .cli import main

sys.exit(main())
