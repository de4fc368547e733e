"""`trl-a3po plan`: how long a step will take, what will be idle, how stale tokens will be, and how to split GPUs.

Guarantees: nothing is trained, generated or downloaded but the configuration of `--model`; the rules of the queue are
those of the settings, checked as `trl-a3po train` checks them; a rate that is neither given nor measured raises.
"""

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from peft import get_peft_model
from rich.console import Console
from rich.table import Table
from transformers import AutoConfig, AutoModelForCausalLM
from trl import ModelConfig, get_peft_config

from trl_a3po.cli.numbers import COUNT, GIBIBYTES, SECONDS, SEQUENCES, SPEED, TOKENS, NumberAction, Numbers
from trl_a3po.cli.options import OptionParser, SettingsError, in_home, path_option
from trl_a3po.cli.train import parse_command
from trl_a3po.config import A3POConfig
from trl_a3po.models.memory import GIB
from trl_a3po.planning.best_split import best_splits, splits
from trl_a3po.planning.finished_run import FinishedRun, finished_run, rates_of
from trl_a3po.planning.forecast import Forecast, forecast
from trl_a3po.planning.policy_size import PolicySize, check_one_policy
from trl_a3po.planning.rates import EngineSpeed, Rates
from trl_a3po.planning.rules import Rules
from trl_a3po.planning.simulation import Split
from trl_a3po.planning.training_rates import training_rates
from trl_a3po.planning.workload import Draw, Fixed, Geometric, Workload
from trl_a3po.report.memory import EngineMemory, TrainerMemory
from trl_a3po.report.timeline import read_timeline
from trl_a3po.session.build_engine import queue_rules, split_of

TOKEN_BYTES = 76  # of a token that waits in the queue: three places in lists, an int, a float
EPILOG = """
examples:
  trl-a3po plan --run outputs/run                                   # the run as it was, forecast and measured
  trl-a3po plan --run outputs/run --config recipe.yaml --max_staleness 1
  trl-a3po plan --run outputs/run --run outputs/other --config recipe.yaml  # two runs with other micro-batches
  trl-a3po plan --run outputs/run --gpus 8                          # the best split of 8 GPUs like those of the run
  trl-a3po plan --gpus 16 --model Qwen/Qwen3-8B --num_generations 16 --generation_batch_size 1024
                --max_completion_length 8192 --lengths geometric:3000
                --engine_speed 64:3000 256:7000 --training_speed 4000 --publish_seconds 2

Every field of A3POConfig and ModelConfig can be given as --field value, as for trl-a3po train.
"""


@dataclass(frozen=True)
class Plan:
    """
    Args:
        forecasts: the best one first.
        run: the finished run that was given alone, `None` otherwise.
        memory: GiB by name, of each forecast; empty without a model.
        unknown: what the rates do not say and the first forecast depends on, `None` if there is nothing.
    """

    forecasts: list[Forecast]
    run: FinishedRun | None
    memory: list[dict[str, float]]
    unknown: str | None = None


def make_parser() -> OptionParser:
    parser = OptionParser(
        "trl-a3po plan",
        description="Forecast a run by simulating its queue: time of a step, idle shares, staleness, memory, and the "
        "best split of GPUs.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument

    def number(name: str, numbers: Numbers, **more: Any) -> None:
        add(name, action=NumberAction, numbers=numbers, **more)

    add("--run", action="append", default=[], type=path_option, metavar="RUN", help="output_dir of a finished run, "
        "for its rates, lengths and rewards, and for its settings if none are given; the first one counts if you "
        "repeat it, and all of them for the speeds of training and of the engine")  # fmt: skip
    add("--config", type=path_option, metavar="RECIPE.yaml", help="the settings of the run to forecast")
    add("--model", type=in_home, help="folder or name of the model, for the memory; its weights are not loaded")
    number("--gpus", COUNT, help="find the best split of so many GPUs between training and generation")
    number("--gpus_per_engine", COUNT, help="GPUs of one engine (default: vllm_tensor_parallel_size, or 1)")
    number("--gpu_memory", GIBIBYTES, metavar="GIB", help="with --model: leave out splits that do not fit")
    add("--zero_stage", type=int, choices=(0, 1, 2, 3), default=0, help="DeepSpeed ZeRO, for the memory (default: 0)")
    add("--fsdp", action="store_true", help="the trainers are launched with FSDP2, for the memory")
    number("--trainers", COUNT, help="processes that train, without --gpus (default: those of the run, or 1)")
    add("--lengths", metavar="fixed:N|geometric:N", help="tokens of a completion: always N, or N on average and then "
        "cut at max_completion_length (default: those of the run)")  # fmt: skip
    number("--reward_seconds", SECONDS, help="time of the reward functions for one group (default: of the run, or 0)")
    add("--engine_speed", nargs="+", metavar="N:RATE", help="tokens per second of one engine that decodes N sequences "
        "at the same time, for one or several N (default: measured in the run)")  # fmt: skip
    number("--training_speed", SPEED, help="completion tokens per second of one GPU that trains (default: measured)")
    number("--micro_step_seconds", SECONDS, help="what a micro-step takes besides (default: of the run, or 0)")
    number(
        "--optimizer_step_seconds", SECONDS, help="what an optimizer step takes besides (default: of the run, or 0)"
    )
    number("--publish_seconds", SECONDS, help="time that training waits for a publish (default: of the run, or 0)")
    add("--json", action="store_true", help="print JSON instead of a table")
    return parser


def run(arguments: Sequence[str]) -> None:
    """Print the plan.

    Raises:
        OSError: a run or the model is not there.
        ValueError: something is missing, or cannot hold.
    """
    parsed, settings = make_parser().parse_known_args(arguments)
    with redirect_stdout(sys.stderr):  # some libraries print while they are imported
        plan = make_plan(parsed, settings)
    if parsed.json:
        print(json.dumps(as_json(plan), indent=1))
    else:
        show(plan, Console())


def make_plan(parsed: argparse.Namespace, settings: Sequence[str]) -> Plan:
    """What the arguments ask for."""
    _check_together(parsed)
    runs = [finished_run(read_timeline(folder)) for folder in parsed.run]
    check_one_policy({f"--run {folder}": run.policy for folder, run in zip(parsed.run, runs, strict=True)})
    args, model_args = _settings(parsed, settings, runs)
    alone = len(runs) == 1 and args is None and parsed.trainers is None and parsed.gpus is None
    per_engine = _gpus_per_engine(parsed, args)
    rules, split = _rules(args, runs, parsed.trainers)
    work, rates = _workload(parsed, runs, args), _rates(parsed, runs)
    memory = _memory(parsed, args, model_args, per_engine, runs)
    if parsed.gpus is None:
        forecasts = [forecast(work, rates, split, rules)]
    else:
        candidates = splits(parsed.gpus, per_engine, split.slots, rules)
        fits = memory.fits if memory is not None and parsed.gpu_memory is not None else lambda split: True
        forecasts = best_splits(work, rates, rules, candidates, fits)
    sizes = [] if memory is None else [memory.of(made, rules, work) for made in forecasts]
    unknown = _unknown(parsed, runs, forecasts[0], work, rates, rules)
    return Plan(forecasts, runs[0] if alone else None, sizes, unknown)


def as_json(plan: Plan) -> dict[str, Any]:
    rows = [asdict(made) for made in plan.forecasts]
    for row, memory in zip(rows, plan.memory, strict=False):
        row["memory_gib"] = memory
    measured = None if plan.run is None else {"step_seconds": plan.run.step_seconds, "waiting": plan.run.waiting}
    return {"forecasts": rows, "measured": measured, "unknown": plan.unknown}


def show(plan: Plan, console: Console) -> None:
    table = Table("", *(f"{made.split.trainers} train, {made.split.engines} generate" for made in plan.forecasts))
    for name, value in ROWS.items():
        table.add_row(name, *map(value, plan.forecasts))
    for name in plan.memory[0] if plan.memory else ():
        table.add_row(f"memory of {name}", *(f"{sizes[name]:.1f} GiB" for sizes in plan.memory))
    console.print(table)
    best = plan.forecasts[0]
    if plan.run is not None:
        error = best.step_seconds / plan.run.step_seconds - 1
        console.print(
            f"Measured: {plan.run.step_seconds:.3g} s a step, waiting {plan.run.waiting:.0%} of it; the forecast is "
            f"{abs(error):.0%} {'longer' if error > 0 else 'shorter'}.",
            highlight=False,
        )
    if plan.unknown is not None:
        console.print(plan.unknown, highlight=False)
    if best.verdict is not None:
        console.print(best.verdict.sentence, highlight=False)


ROWS: dict[str, Callable[[Forecast], str]] = {
    "time of a step": lambda made: f"{made.step_seconds:.3g} s",
    "at least": lambda made: f"{made.bound:.3g} s",
    "trained tokens/s": lambda made: f"{made.tokens_per_second:,.0f}",
    "trainer waits": lambda made: f"{made.waiting:.0%}",
    "trainer publishes": lambda made: f"{made.publishing:.0%}",
    "engines idle": lambda made: f"{made.engine_idle:.0%}",
    "slots in use": lambda made: f"{made.slots_used:.0%}",
    "reward workers idle": lambda made: f"{made.rewards_idle:.0%}",
    "staleness": lambda made: f"{made.mean_staleness:.2f}, at most {max(made.staleness)}",
    "groups ready": lambda made: f"{made.ready:.1f}",
}


# --- from the arguments -------------------------------------------------------------------------------------------


def _check_together(parsed: argparse.Namespace) -> None:
    if parsed.gpus is not None and parsed.trainers is not None:
        raise SettingsError(
            f"--trainers is {parsed.trainers}, but --gpus {parsed.gpus} asks for the best number of trainers: leave "
            "one of the two out."
        )


def _settings(
    parsed: argparse.Namespace, settings: Sequence[str], runs: Sequence[FinishedRun]
) -> tuple[A3POConfig, ModelConfig] | tuple[None, None]:
    """The configuration of the run to forecast, `None` for that of the finished run."""
    if parsed.config is None and not settings and runs:
        if parsed.model is not None:
            raise SettingsError(
                f"--model is {parsed.model!r}, but its memory depends on settings that --run does not hold: give "
                "--config RECIPE.yaml or --field value too, or leave --model out."
            )
        return None, None
    if parsed.config is not None and not parsed.config.is_file():
        raise FileNotFoundError(f"--config is {str(parsed.config)!r}, but there is no such file.")
    if settings and not settings[0].startswith("-") and not Path(settings[0]).is_file():
        raise SettingsError(f"{settings[0]!r} is given alone: write --run RUN or --config RECIPE.yaml.")
    recipe = [] if parsed.config is None else [str(parsed.config)]
    _, args, model_args, _ = parse_command([*recipe, *settings], make_parser().names)
    return args, model_args


def _rules(args: A3POConfig | None, runs: Sequence[FinishedRun], trainers: int | None) -> tuple[Rules, Split]:
    if args is None:
        split = runs[0].split
        return runs[0].rules, split if trainers is None else replace(split, trainers=trainers)
    known = runs[0].split.trainers if runs else 1
    return queue_rules(args), split_of(args, known if trainers is None else trainers)


def _gpus_per_engine(parsed: argparse.Namespace, args: A3POConfig | None) -> int:
    if parsed.gpus_per_engine is not None:
        return int(parsed.gpus_per_engine)
    return 1 if args is None else args.vllm_tensor_parallel_size


def _workload(parsed: argparse.Namespace, runs: Sequence[FinishedRun], args: A3POConfig | None) -> Workload:
    if parsed.lengths is not None:
        lengths = _lengths(parsed.lengths, args)
    elif runs:
        lengths = runs[0].work.lengths
    else:
        raise ValueError("The lengths of completions are not known: give --lengths geometric:N or fixed:N, or --run.")
    if parsed.reward_seconds is not None:
        return Workload(lengths, Fixed(parsed.reward_seconds))
    return Workload(lengths, runs[0].work.reward_seconds) if runs else Workload(lengths)


def _lengths(text: str, args: A3POConfig | None) -> Draw:
    kind, _, written = text.partition(":")
    number = TOKENS.read(written)
    if kind not in ("fixed", "geometric") or number is None:
        raise SettingsError(
            f"--lengths is {text!r}, but it must be fixed:N or geometric:N, such as geometric:300, with N {TOKENS}."
        )
    if kind == "fixed":
        return Fixed(number)
    if args is None:
        raise SettingsError("--lengths geometric:N needs the length at which completions are cut: give --config or "
                         "--max_completion_length.")  # fmt: skip
    return Geometric(number, args.max_completion_length)


def _rates(parsed: argparse.Namespace, runs: Sequence[FinishedRun]) -> Rates:
    measured = rates_of(runs) if runs else None
    points = dict(measured.engine.points) if measured is not None else {}
    if parsed.engine_speed is not None:
        points = _points(parsed.engine_speed)
    if not points:
        raise ValueError("The speed of an engine is not known: give --engine_speed N:RATE, or --run RUN.")
    training = parsed.training_speed
    if training is None and not runs:
        raise ValueError("The speed of training is not known: give --training_speed, or --run RUN.")

    def given(value: float | None, name: str) -> float:
        return value if value is not None else getattr(measured, name) if measured is not None else 0.0

    return Rates(
        EngineSpeed(tuple(points.items())),
        given(training, "training_tokens_per_second"),
        given(parsed.micro_step_seconds, "micro_step_seconds"),
        given(parsed.publish_seconds, "publish_seconds"),
        given(parsed.optimizer_step_seconds, "optimizer_step_seconds"),
    )


def _unknown(
    parsed: argparse.Namespace, runs: Sequence[FinishedRun], made: Forecast, work: Workload, rates: Rates, rules: Rules
) -> str | None:
    """Whether the forecast depends on how the time besides the tokens is shared out between micro-steps and optimizer
    steps, which runs with one number of micro-steps do not say."""
    given = parsed.training_speed, parsed.micro_step_seconds, parsed.optimizer_step_seconds
    measured = {run.rules.micro_steps_per_step for run in runs}
    if not runs or any(value is not None for value in given) or rules.micro_steps_per_step in measured:
        return None
    if training_rates([run.takes for run in runs]).told_apart:
        return None
    (number,) = measured if len(measured) == 1 else (runs[0].rules.micro_steps_per_step,)
    besides = ""
    if rates.micro_step_seconds:
        moved = replace(rates, micro_step_seconds=0.0, optimizer_step_seconds=number * rates.micro_step_seconds)
        other = forecast(work, moved, made.split, rules).step_seconds
        besides = f"; if all of it belongs to the optimizer step, a step takes {other:.3g} s"
    return (
        f"Not known: how much of the training time belongs to each micro-step. The runs have {number} of them per "
        f"optimizer step, and this one has {rules.micro_steps_per_step}{besides}. Add a --run of a few steps with "
        "other micro-batches (per_device_train_batch_size, gradient_accumulation_steps)."
    )


def _points(texts: Sequence[str]) -> dict[float, float]:
    """Tokens per second of an engine by its number of sequences."""
    points: dict[float, float] = {}
    for text in texts:
        written = text.split(":")
        sequences, rate = (SEQUENCES.read(written[0]), SPEED.read(written[1])) if len(written) == 2 else (None, None)
        if sequences is None or rate is None:
            raise SettingsError(
                f"--engine_speed has {text!r}, but a point is SEQUENCES:TOKENS_PER_SECOND, such as 64:17000: "
                f"{SEQUENCES}, and {SPEED}."
            )
        if sequences in points:
            raise SettingsError(f"--engine_speed has two points for {sequences:g} sequences: leave one out.")
        points[sequences] = rate
    return points


def _memory(
    parsed: argparse.Namespace,
    args: A3POConfig | None,
    model_args: ModelConfig | None,
    per_engine: int,
    runs: Sequence[FinishedRun],
) -> "_Memory | None":
    """`None` without a model."""
    if args is None or model_args is None or parsed.model is None:
        return None
    memory = _Memory(parsed, args, model_args, per_engine)
    if parsed.training_speed is None or parsed.engine_speed is None:
        memory.check_model(runs)
    return memory


class _Memory:
    """Memory of trainers, engines and queue, from the shape of the model alone."""

    def __init__(self, parsed: argparse.Namespace, args: A3POConfig, model_args: ModelConfig, per_engine: int):
        self.args, self.zero_stage, self.fsdp = args, parsed.zero_stage, parsed.fsdp
        self.limit, self.per_engine, self.name = parsed.gpu_memory, per_engine, parsed.model
        self.is_packed = model_args.load_in_4bit or model_args.load_in_8bit
        dtype = getattr(torch, str(model_args.dtype), torch.float32)  # "auto" is not known without the weights
        self.engine_bytes = 2 if args.bf16 or args.fp16 else dtype.itemsize
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(parsed.model), dtype=dtype)
            adapter = get_peft_config(model_args)
            self.model = model if adapter is None else get_peft_model(model, adapter)

    def check_model(self, runs: Sequence[FinishedRun]) -> None:
        """Raise `SettingsError` if the rates are those of a run of another model."""
        policy = next((run.policy for run in runs if run.policy is not None), None)  # those of all runs are the same
        if policy is None or self.is_packed:  # a run counts packed weights as they are stored
            return
        sizes = [(weight.numel(), weight.requires_grad) for weight in self.model.parameters()]
        trained = sum(numbers for numbers, requires_grad in sizes if requires_grad)
        size = PolicySize(sum(numbers for numbers, _ in sizes), trained, policy.dtype)
        if size != policy:
            raise SettingsError(
                f"--model is {self.name!r}, which has {size}, but the rates are those of --run, whose policy has "
                f"{policy}: give the model and the adapter of the run, or --training_speed and --engine_speed of this "
                "one."
            )

    def fits(self, split: Split) -> bool:
        trainer, engine = self._sizes(split)
        return bool(max(trainer, engine) <= self.limit)

    def of(self, made: Forecast, rules: Rules, work: Workload) -> dict[str, float]:
        trainer, engine = self._sizes(made.split)
        queued = made.outstanding * rules.num_generations * work.lengths.mean * TOKEN_BYTES
        return {"a trainer": trainer, "a GPU of an engine": engine, "queue (host)": queued / GIB}

    def _sizes(self, split: Split) -> tuple[float, float]:
        """GiB of a GPU that trains, and of one that generates."""
        trainer = TrainerMemory.of(self.args, self.model, split.trainers, self.zero_stage, fsdp=self.fsdp)
        engine = EngineMemory.of(self.args, self.model, split.slots, self.engine_bytes)
        return (trainer.held + trainer.activations) / GIB, engine.held / self.per_engine / GIB
