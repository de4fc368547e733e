"""The command `trl-a3po`: train from a recipe, describe this machine, find what is wrong, forecast a run, watch a run,
draw runs, report on runs.

    trl-a3po train recipes/lora_24gb.yaml --learning_rate 2e-5
    trl-a3po env
    trl-a3po doctor recipes/lora_24gb.yaml
    trl-a3po plan --run outputs/one --gpus 8
    trl-a3po watch outputs/one
    trl-a3po plot outputs/one outputs/other --output both.png
    trl-a3po report outputs/one outputs/other --output both.html

Guarantees: a setting on the command line overrides the recipe; a command that cannot do what it is asked to ends with
one sentence and exit code 2 (`train`: 1), and one whose output is not read any more ends quietly.
"""

import argparse
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from trl_a3po import __version__
from trl_a3po.cli.options import OptionParser, SettingsError, check_rest, path_option, subject_and_options
from trl_a3po.cli.unread_output import quiet_when_unread

OF_REPORTS = ("matplotlib", "rich", "plotly", "jinja2")  # packages that `trl-a3po[report]` installs


def main(arguments: Sequence[str] | None = None) -> None:
    """Run `trl-a3po` with `arguments`; by default with those of the process."""
    with quiet_when_unread():
        _run(list(sys.argv[1:] if arguments is None else arguments))


def _run(arguments: list[str]) -> None:
    if arguments[:1] == ["train"]:  # has a parser of its own, with every field of the configuration
        from trl_a3po.cli.train import run

        try:
            run(arguments[1:])
        except SettingsError as error:
            sys.exit(f"trl-a3po train: {error}")
    elif arguments[:1] == ["doctor"] and not {"-h", "--help"} & set(arguments):  # takes the settings of a recipe too
        sys.exit(_doctor(arguments[1:]))
    elif arguments[:1] == ["plan"]:  # takes the settings of a recipe too
        from trl_a3po.cli.plan import run as plan

        with _refusals("trl-a3po plan"):
            plan(arguments[1:])
    else:
        with _refusals("trl-a3po"):
            parsed, rest = _parser().parse_known_args(arguments)
            check_rest(rest, parsed.options)
            parsed.run(parsed)


@contextmanager
def _refusals(command: str) -> Iterator[None]:
    """End the command with one sentence, and exit code 2, if it cannot do what it is asked to."""
    try:
        yield
    except BrokenPipeError:  # of whoever reads the output
        raise
    except ModuleNotFoundError as error:
        if error.name not in OF_REPORTS:
            raise
        _parser().exit(2, f"{command}: {error.name} is not installed: pip install 'trl-a3po[report]'.\n")
    except (OSError, ValueError) as error:
        _parser().exit(2, f"{command}: {' '.join(str(error).split())}\n")


def _parser() -> argparse.ArgumentParser:
    description = "Asynchronous RL behind TRL's GRPOTrainer."
    parser = argparse.ArgumentParser("trl-a3po", description=description, allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"trl-a3po {__version__}")
    commands = parser.add_subparsers(required=True, metavar="command", parser_class=OptionParser)
    commands.add_parser("train", help="train from a recipe: trl-a3po train RECIPE.yaml [--field value …]")
    env = commands.add_parser("env", help="print what a bug report needs: versions, devices, packages")
    env.set_defaults(run=_env, options=env.names)
    doctor = commands.add_parser("doctor", help="what is wrong with a set-up, or went wrong in a run")
    doctor.add_argument("what", nargs="+", metavar="RECIPE.yaml [--field value …] | RUN", help="see docs/doctor.md")
    watch = commands.add_parser("watch", help="show what a run does, and what limits it, while it goes on")
    watch.add_argument("watched", type=path_option, metavar="RUN", help="folder of a run, or its timeline.jsonl")
    watch.add_argument("--once", action="store_true", help="print one frame, for a pipe or a log")
    watch.set_defaults(run=_watch, options=watch.names)
    plan = commands.add_parser("plan", help="forecast a run: time of a step, idle shares, best split of GPUs")
    plan.add_argument("what", nargs="*", metavar="--run RUN | --config RECIPE.yaml | --gpus N …", help="see --help")
    plot = commands.add_parser("plot", help="draw one or several runs in one image")
    plot.add_argument(
        "runs", nargs="+", type=path_option, metavar="RUN", help="folder of a run, or its trainer_state.json"
    )
    plot.add_argument("--output", type=path_option, default=Path("runs.png"), help="image file (default: runs.png)")
    plot.set_defaults(run=_plot, options=plot.names)
    report = commands.add_parser("report", help="write one HTML page about one or several runs")
    report.add_argument("runs", nargs="+", type=path_option, metavar="RUN", help="folder of a run")
    report.add_argument(
        "--output", type=path_option, default=Path("report.html"), help="HTML file (default: report.html)"
    )
    report.set_defaults(run=_report, options=report.names)
    return parser


def _env(parsed: argparse.Namespace) -> None:
    from trl_a3po.report.environment import environment

    print(environment())


def _doctor(arguments: Sequence[str]) -> int:
    """Print the findings. Returns 1 if one of them is a problem."""
    findings: list[str] = []
    with _refusals("trl-a3po doctor"):
        for finding in _findings(arguments):
            print(finding, flush=True)
            findings.append(finding)
    problem = any(finding.startswith("PROBLEM") for finding in findings)
    print("There is a problem." if problem else "No problem was found.")
    return int(problem)


def _findings(arguments: Sequence[str]) -> Iterable[str]:
    given, options = subject_and_options(arguments)
    path = path_option(given or "")
    before = path.suffix in (".yaml", ".yml") or "--config" in {word.partition("=")[0] for word in arguments}
    if given is None or (before and not path.is_file()):
        missing = "" if given is None else f"there is no recipe {given!r}: "
        raise SettingsError(f"{missing}give a recipe (.yaml), or the output_dir, a checkpoint or the log of a run.")
    if before:
        from trl_a3po.cli.doctor import examine

        return examine([str(path), *options])
    from trl_a3po.cli.diagnosis import diagnose

    check_rest(options, ())
    return diagnose(path)


def _watch(parsed: argparse.Namespace) -> None:
    from trl_a3po.report.watch import watch

    watch(parsed.watched, once=parsed.once)


def _plot(parsed: argparse.Namespace) -> None:
    from trl_a3po.report.chart_style import image_path
    from trl_a3po.report.history import read_history
    from trl_a3po.report.plot_runs import plot_runs
    from trl_a3po.report.timeline import NAME, read_timeline

    output = image_path(parsed.output)
    names = run_names(parsed.runs)
    histories = [read_history(run) for run in parsed.runs]
    alone = parsed.runs[0] if len(parsed.runs) == 1 else None
    timeline = read_timeline(alone) if alone is not None and (alone / NAME).is_file() else None
    plot_runs(list(zip(names, histories, strict=True)), output, timeline)
    print(f"{Path(output).resolve()} shows {', '.join(names)}")


def _report(parsed: argparse.Namespace) -> None:
    from trl_a3po.cli.diagnosis import diagnose
    from trl_a3po.report.html.reported_run import read_run
    from trl_a3po.report.html.write_report import write_report

    names = run_names(parsed.runs)
    runs = [read_run(name, run, diagnose(run)) for name, run in zip(names, parsed.runs, strict=True)]
    write_report(runs, parsed.output)
    print(f"{Path(parsed.output).resolve()} shows {', '.join(names)}")


def run_names(runs: Sequence[Path]) -> list[str]:
    """The name of each run in an image: its folder, with as many parent folders as distinguish it from the other runs,
    and a number where the same folder is given twice."""
    folders = [run.resolve() if run.is_dir() else run.resolve().parent for run in runs]
    names = []
    for i, folder in enumerate(folders):
        depths = range(1, len(folder.parts) + 1)
        others = [other for other in folders if other != folder]
        depth = next(d for d in depths if all(other.parts[-d:] != folder.parts[-d:] for other in others))
        name = "/".join(folder.parts[-depth:])
        names.append(f"{name} ({folders[: i + 1].count(folder)})" if folders.count(folder) > 1 else name)
    return names
