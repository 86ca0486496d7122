"""`metselect ...`: train, partition, compare, reproduce, explain, demo and doctor."""

import argparse
import dataclasses
import os
import sys
import types
import typing
from pathlib import Path

from . import __version__, doctor
from .atomic_file import write_atomic
from .config import Config
from .experiments.scope import FULL, QUICK


def main(argv: list[str] | None = None) -> int:
    """Entry of the console script; expected errors are one line on stderr and status 1."""
    args = _parser().parse_args(argv)
    os.environ["METSELECT_KEEP_MEMORY"] = str(int(args.keep_memory))  # also for its processes
    try:
        return args.run(args) or 0
    except KeyboardInterrupt:
        print("\ninterrupted; the same command goes on from the last checkpoint", file=sys.stderr)
        return 130
    except Exception as error:
        if os.environ.get("METSELECT_TRACEBACK") or not _expected(error):
            raise
        print(f"metselect: {error}", file=sys.stderr)
        return 1


def _expected(error: Exception) -> bool:
    """Of the user's input; DGL has an error class of its own, known once DGL is imported."""
    dgl = sys.modules.get("dgl")
    own = (dgl.DGLError,) if dgl else ()
    return isinstance(error, (ValueError, TypeError, RuntimeError, OSError, *own))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="metselect", description="Choose for every node the GNN layer most sure of its class."
    )
    parser.add_argument("--version", action="version", version=__version__)
    parser.add_argument(
        "--keep-memory",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="keep freed memory for the next epoch, which is faster (default: yes)",
    )
    words = parser.add_subparsers(required=True, metavar="WORD")
    _add_train(words)
    _add_partition(words)
    _add_compare(words)
    _add_reproduce(words)
    _add_explain(words)
    word = _word(words, "demo", _demo, "train on the embedded dataset and show the choices")
    word.add_argument("--out", type=Path, default=Path("runs/demo"))
    word.add_argument("--seed", type=int, default=0)
    word = _word(words, "doctor", _doctor, "what works here, and the remedy for what does not")
    _add_data_dir(word)
    return parser


def _word(words, name: str, run, text: str) -> argparse.ArgumentParser:
    word = words.add_parser(name, help=text, description=text, allow_abbrev=False)
    word.set_defaults(run=run)
    return word


def _add_data_dir(word) -> None:
    word.add_argument("--data-dir", help="folder of .npz datasets (default: $METSELECT_DATA)")


def _add_config(word, without: tuple[str, ...] = ()) -> None:
    """One flag for every field of Config; only those that are given end up in the namespace."""
    group = word.add_argument_group("settings")
    for field in dataclasses.fields(Config):
        if field.name in without:
            continue
        kinds = set(typing.get_args(field.type)) or {field.type}
        options = {"default": argparse.SUPPRESS, "help": field.metadata["help"]}
        if field.default is not None:
            options["help"] += f" (default: {field.default})"
        if bool in kinds:
            options["action"] = argparse.BooleanOptionalAction
        else:
            options["type"] = _reader(kinds - {types.NoneType})
            options["metavar"] = "X"
        group.add_argument("--" + field.name.replace("_", "-"), **options)


def _reader(kinds: set[type]):
    if kinds != {str, float}:
        return next(iter(kinds))

    def number_or_word(text: str) -> float | str:
        try:
            return float(text)
        except ValueError:
            return text

    return number_or_word


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of 1 or more")
    return int(text)


def _given(args) -> dict:
    names = {field.name for field in dataclasses.fields(Config)}
    return {name: value for name, value in vars(args).items() if name in names}


def _add_train(words) -> None:
    word = _word(words, "train", _train, "train one model; the same command resumes it")
    word.add_argument("--out", type=Path, help="folder of the run (default: runs/NAME)")
    word.add_argument("--overwrite", action="store_true", help="start anew in a used folder")
    text = "folder of `metselect partition`, in place of a dataset"
    word.add_argument("--partitions", type=Path, metavar="DIR", help=text)
    text = "the servers of the partitions, as DistDGL reads them (default: this process alone)"
    word.add_argument("--ip-config", metavar="FILE", help=text)
    _add_data_dir(word)
    _add_config(word)


def _train(args) -> None:
    from .train.distributed import team_of_torchrun

    config = Config(**_given(args))
    if args.partitions is not None:
        from .train.distdgl import train_partitions

        out = args.out or Path("runs") / f"{args.partitions.name}-{config.selector}"
        if args.overwrite and os.environ.get("RANK", "0") == "0":
            (out / "checkpoint.pt").unlink(missing_ok=True)
        return train_partitions(config, args.partitions, args.ip_config, out)
    with team_of_torchrun(config.device) as team:
        _train_in(team, config, args)


def _train_in(team, config: Config, args) -> None:
    from .data import load_dataset
    from .experiments.tables import percent, text_table
    from .train import train

    data = load_dataset(config.dataset, args.data_dir, seed=config.seed)
    name = f"{config.dataset}-{config.backbone}-{config.selector}"
    out = args.out or Path("runs") / f"{name}-split{config.split}-seed{config.seed}"
    if args.overwrite and team.rank == 0:
        (out / "checkpoint.pt").unlink(missing_ok=True)
    team.share(None)  # nobody looks for a checkpoint before it is gone
    run = train(config, data, out, team=team)
    if run is None:
        return
    metrics = run.metrics
    header = ["%", "accuracy", "macro F1", "weighted F1"]
    rows = [[part, *map(percent, metrics[part].values())] for part in ("train", "val", "test")]
    print(f"{data!r}\n{text_table(header, rows)}")
    print(f"best epoch {metrics['best_epoch']} of {metrics['epochs']}; results in {out}")


def _add_partition(words) -> None:
    text = "cut a graph into parts for training on several machines (DistDGL)"
    word = _word(words, "partition", _partition, text)
    word.add_argument("--dataset", default="hop_chain", help="its name (default: hop_chain)")
    word.add_argument("--split", type=int, default=0, help="which of its splits (default: 0)")
    word.add_argument("--seed", type=int, default=0, help="of a synthetic dataset (default: 0)")
    word.add_argument("--parts", type=_positive, default=1, help="one a machine (default: 1)")
    word.add_argument("--out", type=Path, help="folder (default: runs/partitions-DATASET)")
    _add_data_dir(word)


def _partition(args) -> None:
    from .data import load_dataset
    from .train.distdgl import partition

    data = load_dataset(args.dataset, args.data_dir, seed=args.seed)
    out = args.out or Path("runs") / f"partitions-{args.dataset}"
    print(partition(data, args.parts, out, split=args.split, seed=args.seed))


def _add_compare(words) -> None:
    text = "several selectors over several splits; settings are chosen on validation"
    word = _word(words, "compare", _compare, text)
    word.add_argument("--selectors", nargs="+", default=["final", "metselect"], metavar="NAME")
    word.add_argument(
        "--splits", type=_positive, default=10, help="the first so many (default: 10)"
    )
    word.add_argument("--seeds", type=_positive, default=1, help="runs per split (default: 1)")
    _add_jobs(word)
    word.add_argument("--out", type=Path, help="folder (default: runs/compare-DATASET-BACKBONE)")
    _add_data_dir(word)
    _add_config(word, without=("selector", "split"))


def _compare(args) -> None:
    from .data import load_dataset
    from .experiments.compare import check_selectors, compare, report

    check_selectors(args.selectors)
    base = Config(**_given(args))
    data = load_dataset(base.dataset, args.data_dir, seed=base.seed)
    splits = min(args.splits, data.n_splits)
    print(f"{data!r}; {splits} splits, {args.seeds} seed(s), {base.backbone}")
    out = args.out or Path("runs") / f"compare-{base.dataset}-{base.backbone}"
    outcomes = compare(
        base,
        args.selectors,
        splits=splits,
        seeds=args.seeds,
        fixed=set(_given(args)),
        data_dir=args.data_dir,
        out=out,
        jobs=args.jobs,
    )
    text = report(outcomes)
    write_atomic(out / "report.txt", lambda file: file.write(text.encode()))
    print(f"\n{text}\n\nevery run: {out / 'results.jsonl'}")


def _add_jobs(word) -> None:
    word.add_argument("--jobs", type=_positive, default=os.cpu_count() or 1, help="processes")


def _add_reproduce(words) -> None:
    text = "the paper's tables and figures beside ours; the same command goes on after a stop"
    word = _word(words, "reproduce", _reproduce, text)
    text = (
        f"some of {', '.join(FULL.studies)} (default: all; {', '.join(QUICK.studies)} if --quick)"
    )
    word.add_argument("studies", nargs="*", metavar="STUDY", help=text)
    word.add_argument("--quick", action="store_true", help="a taste in five minutes")
    word.add_argument("--report", action="store_true", help="only make the page of what is there")
    for name in ("datasets", "backbones", "selectors"):
        text = f"some of {', '.join(getattr(FULL, name))} (default: all)"
        word.add_argument(f"--{name}", nargs="+", metavar="NAME", help=text)
    word.add_argument("--splits", type=_positive, help="the first so many (default: 10)")
    _add_jobs(word)
    word.add_argument("--out", type=Path, help="folder (default: runs/reproduce, or -quick)")
    text = "where the page goes (default: results.md in the folder)"
    word.add_argument("--page", type=Path, metavar="PAGE.md", help=text)
    _add_data_dir(word)


def _reproduce(args) -> None:
    from .experiments.reproduce import reproduce
    from .experiments.results_page import write_page

    names = ("studies", "datasets", "backbones", "selectors", "splits")
    scope = (QUICK if args.quick else FULL).narrowed(**{key: getattr(args, key) for key in names})
    out = args.out or Path("runs/reproduce-quick" if args.quick else "runs/reproduce")
    if not args.report:
        for message in reproduce(scope, args.data_dir, out, args.jobs):
            print(f"left out: {message}")
    page = args.page or out / "results.md"
    print(write_page(out, page))
    print(page)


def _add_explain(words) -> None:
    word = _word(words, "explain", _explain, "why a node was given its layer")
    word.add_argument("node", type=int)
    word.add_argument("--run", dest="folder", type=Path, help="of a run (default: the newest)")
    _add_data_dir(word)


def _explain(args) -> None:
    from .experiments.explain import explain

    print(explain(args.folder or _newest_run(), args.node, args.data_dir))


def _newest_run() -> Path:
    checkpoints = sorted(Path("runs").glob("**/checkpoint.pt"), key=lambda p: p.stat().st_mtime)
    if not checkpoints:
        raise ValueError("there is no run below runs/; train one first, or name it with --run")
    return checkpoints[-1].parent


def _demo(args) -> None:
    from .experiments.demo import demo

    print(demo(args.out, args.seed))


def _doctor(args) -> int:
    return doctor.main(args.data_dir)


if __name__ == "__main__":
    sys.exit(main())
