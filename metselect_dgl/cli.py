"""The command line: `metselect train`, `compare`, `reproduce`, `explain` and others."""

import argparse
import dataclasses
import os
import re
import signal
import sys
import types
import typing
from pathlib import Path

from . import __version__, build, doctor
from .atomic_file import only_writer, write_atomic
from .config import Config
from .experiments.studies import FULL, QUICK, STUDIES, check_names


def main(argv: list[str] | None = None) -> int:
    """Run a command; expected errors are printed as one line on stderr, with status 1."""
    args = _parser().parse_args(argv)
    try:
        status = args.run(args) or 0
    except KeyboardInterrupt:
        text = "interrupted; the same command resumes from the last checkpoint"
        print(f"\n{text}", file=sys.stderr)
        status = 130
    except Exception as error:
        expected = [ValueError, TypeError, RuntimeError, OSError, ImportError]
        if "dgl" in sys.modules:  # its error class exists once a command has imported it
            expected.append(sys.modules["dgl"].DGLError)
        if os.environ.get("METSELECT_TRACEBACK") or not isinstance(error, tuple(expected)):
            raise
        print(f"metselect: {error}", file=sys.stderr)
        status = 1
    if int(os.environ.get("WORLD_SIZE", 1)) > 1 or "DGL_DIST_MODE" in os.environ:
        # Threads of gloo may abort an ordinary exit, and servers wait for a trainer that hangs.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="metselect", description="Select a GNN layer for every node by class distances."
    )
    parser.add_argument("--version", action="version", version=__version__)
    parser.add_argument(
        "--keep-memory",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="keep freed memory for the next epoch, which is faster (default: yes)",
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_train(commands)
    _add_partition(commands)
    _add_launch(commands)
    _add_compare(commands)
    _add_reproduce(commands)
    command = _command(commands, "explain", _explain, "explain the layer selected for a node")
    command.add_argument("node", type=int)
    text = "folder of the run (default: the newest)"
    command.add_argument("--run", dest="folder", type=Path, help=text)
    _add_data_dir(command)
    command = _command(commands, "demo", _demo, "train on a synthetic dataset, print the selection")
    command.add_argument("--out", type=Path, default=Path("runs/demo"))
    command.add_argument("--seed", type=int, default=0)
    _command(commands, "build", lambda args: build.main(), "compile the operators for this torch")
    text = "check this installation and suggest remedies"
    command = _command(commands, "doctor", lambda args: doctor.main(args.data_dir), text)
    _add_data_dir(command)
    return parser


def _command(commands, name: str, run, text: str) -> argparse.ArgumentParser:
    command = commands.add_parser(name, help=text, description=text, allow_abbrev=False)
    command.set_defaults(run=run)
    return command


def _add_data_dir(command) -> None:
    command.add_argument("--data-dir", help="folder of .npz datasets (default: $METSELECT_DATA)")


def _add_jobs(command) -> None:
    text = "number of processes (default: one per CPU)"
    command.add_argument("--jobs", type=_positive, default=os.cpu_count() or 1, help=text)


def _add_config(command, without: tuple[str, ...] = ()) -> None:
    """Add a flag for every field of Config; only given flags are in the namespace."""
    group = command.add_argument_group("settings")
    for field in dataclasses.fields(Config):
        if field.name in without:
            continue
        kinds = set(typing.get_args(field.type) or [field.type]) - {types.NoneType}
        options = {"default": argparse.SUPPRESS, "help": field.metadata["help"]}
        if field.default is not None:
            options["help"] += f" (default: {field.default})"
        if bool in kinds:
            options["action"] = argparse.BooleanOptionalAction
        else:
            options["type"] = _number_or_name if kinds == {str, float} else kinds.pop()
            options["metavar"] = "X"
        group.add_argument("--" + field.name.replace("_", "-"), **options)


def _number_or_name(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:
        return text


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of 1 or more")
    return int(text)


def _below_runs(name: str) -> Path:
    """Return a folder in runs/, also for a dataset whose name is a path."""
    return Path("runs") / re.sub(r"[^\w.-]+", "-", name).lstrip(".-")


def _given_settings(args) -> dict:
    names = {field.name for field in dataclasses.fields(Config)}
    return {name: value for name, value in vars(args).items() if name in names}


def _add_train(commands) -> None:
    command = _command(commands, "train", _train, "train one model; the same command resumes it")
    command.add_argument("--out", type=Path, help="folder of the run (default: runs/NAME)")
    text = "remove the checkpoint and the results in the folder and start again"
    command.add_argument("--overwrite", action="store_true", help=text)
    text = "folder of `metselect partition`, instead of a dataset"
    command.add_argument("--partitions", type=Path, metavar="DIR", help=text)
    text = "DistDGL's file of servers of the partitions (default: this process alone)"
    command.add_argument("--ip-config", metavar="FILE", help=text)
    text = "several processes: seconds within which all must have started (default: 600)"
    command.add_argument("--join-timeout", type=float, default=600.0, metavar="S", help=text)
    _add_data_dir(command)
    _add_config(command)


def _train(args) -> None:
    from .data import load_dataset
    from .experiments.tables import percent, text_table
    from .train import train
    from .train.distributed import process_group

    settings = _given_settings(args)
    config = Config(**settings)
    config.check_used(settings, config.backbone, [config.selector])
    if args.partitions is not None:
        from .train.distdgl import train_partitions

        out = args.out or _below_runs(f"{args.partitions.name}-{config.selector}")
        options = {"join_timeout": args.join_timeout, "keep_memory": args.keep_memory}
        options["overwrite"] = args.overwrite
        return train_partitions(config, args.partitions, args.ip_config, out, **options)
    with process_group(config.device, args.join_timeout) as group:
        data = load_dataset(config.dataset, args.data_dir, seed=config.seed)
        name = f"{config.dataset}-{config.backbone}-{config.selector}"
        out = args.out or _below_runs(f"{name}-split{config.split}-seed{config.seed}")
        options = {"keep_memory": args.keep_memory, "overwrite": args.overwrite}
        run = train(config, data, out, group=group, **options)
        if run is None:
            return
        rows = []
        for part in ("train", "val", "test"):
            rows.append([part, *map(percent, run.metrics[part].values())])
        print(f"{data!r}\n{text_table(['%', 'accuracy', 'macro F1', 'weighted F1'], rows)}")
        epochs = f"best epoch {run.metrics['best_epoch']} of {run.metrics['epochs']}"
        print(f"{epochs}; results in {out}")


def _add_partition(commands) -> None:
    text = "partition a graph for training on several machines (DistDGL)"
    command = _command(commands, "partition", _partition, text)
    command.add_argument("--dataset", default="hop_chain", help="its name (default: hop_chain)")
    command.add_argument("--split", type=int, default=0, help="number of its split (default: 0)")
    command.add_argument("--seed", type=int, default=0, help="of a synthetic dataset (default: 0)")
    command.add_argument("--parts", type=_positive, default=1, help="one per machine (default: 1)")
    command.add_argument("--out", type=Path, help="folder (default: runs/partitions-DATASET)")
    _add_data_dir(command)


def _partition(args) -> None:
    from .data import load_dataset
    from .train.distdgl import partition

    data = load_dataset(args.dataset, args.data_dir, seed=args.seed)
    out = args.out or _below_runs(f"partitions-{args.dataset}")
    print(partition(data, args.parts, out, split=args.split, seed=args.seed))


def _add_launch(commands) -> None:
    text = "train on partitions: start servers and trainers on several machines by ssh"
    command = _command(commands, "launch", _launch, text)
    text = "lines ADDRESS [PORT], one per part; the same path on all machines"
    command.add_argument("--hosts", type=Path, required=True, metavar="FILE", help=text)
    text = "folder of `metselect partition`; the same path on all machines"
    command.add_argument("--partitions", type=Path, required=True, metavar="DIR", help=text)
    text = "number of trainers on each machine (default: 1)"
    command.add_argument("--trainers", type=_positive, default=1, help=text)
    text = "command that runs a line on {host} (default: ssh, or none for 127.0.0.1)"
    command.add_argument("--ssh", metavar="COMMAND", help=text)
    text = "only print what to start where"
    command.add_argument("--print", action="store_true", dest="dry", help=text)
    command.add_argument("flags", nargs="*", help="flags of `metselect train`, after --")


def _launch(args) -> int | None:
    from .train.launch import launch, plan

    starts = plan(args.hosts, args.partitions, args.trainers, args.flags)
    if not args.dry:
        signal.signal(signal.SIGTERM, signal.default_int_handler)  # the processes end, too
        return launch(starts, args.ssh)
    for start in starts:
        print(f"# {start.name} on {start.host.address}\n{start.line}")


def _add_compare(commands) -> None:
    text = "compare selectors over several splits; settings are chosen on validation nodes"
    command = _command(commands, "compare", _compare, text)
    command.add_argument("--selectors", nargs="+", default=["final", "metselect"], metavar="NAME")
    text = "number of splits, from the first (default: 10)"
    command.add_argument("--splits", type=_positive, default=10, help=text)
    command.add_argument("--seeds", type=_positive, default=1, help="runs per split (default: 1)")
    _add_jobs(command)
    command.add_argument("--out", type=Path, help="folder (default: runs/compare-DATASET-BACKBONE)")
    _add_data_dir(command)
    _add_config(command, without=("selector", "split"))


def _compare(args) -> None:
    from .data import load_dataset
    from .experiments.compare import check_selectors, compare, report
    from .experiments.run_configs import Execution

    check_selectors(args.selectors)
    settings = _given_settings(args)
    base = Config(**settings)
    base.check_used(settings, base.backbone, args.selectors)
    data = load_dataset(base.dataset, args.data_dir, seed=base.seed)
    splits = min(args.splits, data.n_splits)
    print(f"{data!r}; {splits} splits, {args.seeds} seed(s), {base.backbone}")
    out = args.out or _below_runs(f"compare-{base.dataset}-{base.backbone}")
    execution = Execution(args.data_dir, args.jobs, args.keep_memory)
    options = {"splits": splits, "seeds": args.seeds, "fixed": set(settings)}
    with only_writer(out):
        text = report(compare(base, args.selectors, out=out, execution=execution, **options))
        write_atomic(out / "report.txt", lambda file: file.write(text.encode()))
    print(f"\n{text}\n\nall runs: {out / 'results.jsonl'}")


def _add_reproduce(commands) -> None:
    text = "repeat the paper's tables and figures; the same command resumes after an interruption"
    command = _command(commands, "reproduce", _reproduce, text)
    quick = ", ".join(_default_studies(quick=True))
    text = f"some of {', '.join(STUDIES)} (default: all; with --quick: {quick})"
    command.add_argument("studies", nargs="*", metavar="STUDY", help=text)
    text = "a small part of the studies, in about five minutes"
    command.add_argument("--quick", action="store_true", help=text)
    text = "only write the page of the stored results"
    command.add_argument("--report", action="store_true", help=text)
    for name in ("datasets", "backbones", "selectors"):
        text = f"some of {', '.join(getattr(FULL, name))} (default: all)"
        command.add_argument(f"--{name}", nargs="+", metavar="NAME", help=text)
    text = "number of splits, from the first (default: 10)"
    command.add_argument("--splits", type=_positive, help=text)
    _add_jobs(command)
    command.add_argument("--out", type=Path, help="folder (default: runs/reproduce, or -quick)")
    text = "file of the page (default: results.md in the folder)"
    command.add_argument("--page", type=Path, metavar="PAGE.md", help=text)
    _add_data_dir(command)


def _default_studies(quick: bool) -> list[str]:
    return [name for name, study in STUDIES.items() if study.part_of_quick or not quick]


def _reproduce(args) -> None:
    from .experiments.reproduce import reproduce, write_page
    from .experiments.run_configs import Execution

    check_names("studies", args.studies, tuple(STUDIES))
    names = {name: getattr(args, name) for name in ("datasets", "backbones", "selectors")}
    settings = (QUICK if args.quick else FULL).narrowed(args.splits, **names)
    out = args.out or Path("runs/reproduce-quick" if args.quick else "runs/reproduce")
    if not args.report:
        studies = []
        for name in dict.fromkeys(args.studies or _default_studies(args.quick)):
            studies.append(STUDIES[name].quick() if args.quick else STUDIES[name])
        execution = Execution(args.data_dir, args.jobs, args.keep_memory)
        with only_writer(out):
            for message in reproduce(studies, settings, out, execution):
                print(f"left out: {message}")
    page = args.page or out / "results.md"
    print(write_page(out, page), page, sep="\n")


def _explain(args) -> None:
    from .experiments.explain import explain

    folder = args.folder
    if folder is None:
        checkpoints = sorted(Path("runs").glob("**/checkpoint.pt"), key=lambda p: p.stat().st_mtime)
        if not checkpoints:
            raise ValueError("there is no run below runs/; train one first, or name it with --run")
        folder = checkpoints[-1].parent
    print(explain(folder, args.node, args.data_dir))


def _demo(args) -> None:
    from .experiments.demo import demo

    print(demo(args.out, args.seed, keep_memory=args.keep_memory))


if __name__ == "__main__":
    sys.exit(main())
