"""The command `trl-a3po`: train from a recipe, describe this machine, draw finished runs.

    trl-a3po train recipes/lora_24gb.yaml --learning_rate 2e-5
    trl-a3po env
    trl-a3po plot outputs/one outputs/other --output both.png

Guarantees: a setting on the command line wins over the recipe's; what cannot be drawn ends with one sentence and the
exit code 2.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from trl_a3po import __version__


def main(arguments: Sequence[str] | None = None) -> None:
    """Run `trl-a3po` with `arguments`, by default those of the process."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if arguments[:1] == ["train"]:  # its own parser has every field of the configuration
        from trl_a3po.train import run

        run(arguments[1:])
        return
    parsed = _parser().parse_args(arguments)
    try:
        parsed.run(parsed)
    except (OSError, ValueError) as error:
        _parser().exit(2, f"trl-a3po: {error}\n")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("trl-a3po", description="Asynchronous RL behind TRL's GRPOTrainer.")
    parser.add_argument("--version", action="version", version=f"trl-a3po {__version__}")
    commands = parser.add_subparsers(required=True, metavar="command")
    commands.add_parser("train", help="train from a recipe: trl-a3po train RECIPE.yaml [--field value …]")
    env = commands.add_parser("env", help="print what a bug report needs: versions, devices, packages")
    env.set_defaults(run=_env)
    plot = commands.add_parser("plot", help="draw one run, or several in one picture, as PNG")
    plot.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="folder of a run, or its trainer_state.json")
    plot.add_argument("--output", type=Path, default=Path("runs.png"), help="the PNG (default: runs.png)")
    plot.set_defaults(run=_plot)
    return parser


def _env(parsed: argparse.Namespace) -> None:
    from trl_a3po.report.environment import environment

    print(environment())


def _plot(parsed: argparse.Namespace) -> None:
    from trl_a3po.report.compare import plot_runs
    from trl_a3po.report.history import read_history

    plot_runs([(_name(run), read_history(run)) for run in parsed.runs], parsed.output)
    print(f"{parsed.output} shows {', '.join(_name(run) for run in parsed.runs)}")


def _name(run: Path) -> str:
    """What a run is called in a picture: its folder."""
    run = run.resolve()
    return run.name if run.is_dir() else run.parent.name
