"""A pytest plugin that hides DGL: `-p tests.hidden_dgl` runs as if it were not installed."""

import sys
from importlib.machinery import PathFinder


class WithoutDGL(PathFinder):
    """Find every installed package but DGL."""

    @classmethod
    def find_spec(cls, fullname, path=None, target=None):
        return None if fullname == "dgl" else super().find_spec(fullname, path, target)


sys.meta_path[sys.meta_path.index(PathFinder)] = WithoutDGL


def pytest_terminal_summary(terminalreporter):
    terminalreporter.write_line(f"dgl was imported: {'dgl' in sys.modules}")
