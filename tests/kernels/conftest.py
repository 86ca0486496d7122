"""These tests need Triton's interpreter: `tests/test_triton.py` starts a process for them."""

import os

collect_ignore_glob = [] if os.environ.get("TRITON_INTERPRET") == "1" else ["*"]
