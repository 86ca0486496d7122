"""DistDGL on one machine without ssh: partition a dataset, start a server and two trainers.

    python examples/distdgl_local.py [--dataset NAME] [--trainers 2] [-- flags of `metselect train`]

On several machines the same command, `metselect launch`, starts them by ssh; see docs/scaling.md.
"""

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

METSELECT = [sys.executable, "-m", "metselect_dgl"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dataset", default="hop_chain")
    parser.add_argument("--trainers", default="2")
    parser.add_argument("--port", default="30050", help="the first of three")
    parser.add_argument("--out", default="runs/distdgl")
    parser.add_argument("flags", nargs="*", help="more flags of `metselect train`, after --")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        cut = [*METSELECT, "partition", "--dataset", args.dataset, "--out", folder]
        subprocess.run(cut, check=True, stdout=subprocess.DEVNULL)
        hosts = Path(folder, "hosts.txt")
        hosts.write_text(f"127.0.0.1 {args.port}\n")
        launch = ["launch", "--hosts", hosts, "--partitions", folder, "--trainers", args.trainers]
        flags = ["--batch-size", "200", "--epochs", "10", "--out", args.out, *args.flags]
        return subprocess.run([*METSELECT, *launch, "--", *flags]).returncode


if __name__ == "__main__":
    sys.exit(main())
