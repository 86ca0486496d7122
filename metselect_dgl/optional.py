"""DGL is optional: functions, heads and the PyG adapter need none."""

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def needs_dgl(what: str) -> Iterator[None]:
    """Say how to install DGL if an import fails because it is not installed."""
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name != "dgl":
            raise
        raise ImportError(f"{what} needs DGL: pip install 'metselect-dgl[dgl]'") from error
