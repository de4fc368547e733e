"""`trl-a3po doctor RECIPE.yaml [--field value …]`: what a set-up would run into, found before it trains.

Guarantees: every rule is the one that training applies: the recipe is parsed, the trainer is built and its plan is
made as `trl-a3po train` does, and the reward functions are called by the run's own scorer. Nothing is trained,
generated or published.
"""

import logging
import os
import shutil
import tempfile
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from trl_a3po.cli.options import SettingsError
from trl_a3po.cli.train import build_trainer, parse_command
from trl_a3po.engines.vllm.servers.http import HttpFault
from trl_a3po.engines.vllm.servers.server import Server
from trl_a3po.errors import A3POError
from trl_a3po.protocol.records import Group, Prompt, Rejection, Rollout, Score
from trl_a3po.report.environment import environment
from trl_a3po.session.build_scorer import PublishedStates, build_scorer
from trl_a3po.session.prompt_rows import first_prompt
from trl_a3po.trainer import A3POTrainer

SLOW_REWARD = 1.0  # seconds for a group, above which a thread of the trainer's process is not the place
REWARD_LIMIT = 60.0


def examine(arguments: Sequence[str]) -> Iterator[str]:
    """What to know about a set-up, one text after the other; those that begin with "PROBLEM" would end the run.

    Args:
        arguments: as for `trl-a3po train`.
    """
    yield environment()
    try:
        script_args, training_args, model_args, folders = parse_command(arguments)
    except SettingsError as error:
        yield f"PROBLEM: {error}"
        return
    yield from _folder(Path(training_args.output_dir))
    for url in training_args.vllm_server_urls or ():
        yield from _server(url)
    warnings = _Warnings()
    try:
        with warnings:
            trainer = build_trainer(script_args, training_args, model_args, folders)
    except (A3POError, ImportError, OSError, RuntimeError, TypeError, ValueError) as error:
        yield f"PROBLEM: {error}"
        return
    yield from (f"WARNING: {text}" for text in warnings.texts)
    yield trainer.plan()
    yield from _rewards(trainer)


def _folder(folder: Path) -> Iterator[str]:
    existing = next(parent for parent in (folder, *folder.parents) if parent.exists())
    try:
        with tempfile.NamedTemporaryFile(dir=existing):
            pass
    except OSError as error:
        yield f"PROBLEM: output_dir={str(folder)!r} cannot be written ({error}): set another output_dir."
        return
    free = shutil.disk_usage(existing).free / 2**30
    yield f"output_dir {folder}: {free:.1f} GiB free"


def _server(url: str) -> Iterator[str]:
    try:
        info = Server(url).info()
    except HttpFault as fault:
        yield f"PROBLEM: {fault} Start the server, or correct vllm_server_urls."
        return
    yield f"{url}: vLLM {info.version} with {info.model}, {info.max_model_len} tokens"


def _rewards(trainer: A3POTrainer) -> Iterator[str]:
    """Score one group of made-up completions."""
    row, first = first_prompt(trainer)
    prompt = Prompt(0, row, *first)
    tokens = (prompt.token_ids * trainer.max_completion_length)[: trainer.max_completion_length]
    rollout = Rollout(tokens, [-1.0] * len(tokens), [0] * len(tokens), "length")
    group = Group(prompt, [rollout] * trainer.args.num_generations, None, 0)
    scorer = build_scorer(trainer, PublishedStates(trainer))
    found: list[Any] = []

    def score() -> None:
        try:
            scorer.start()
            found.append(scorer(group))
            if isinstance(found[0], Score) and found[0].seconds > SLOW_REWARD:
                found.append(scorer(group))  # the first call may have started a process, or loaded a model
        except A3POError as error:
            found.append(error)

    thread, limit = threading.Thread(target=score, daemon=True), trainer.args.reward_timeout or REWARD_LIMIT
    thread.start()
    thread.join(limit)
    yield _verdict(found, limit, trainer)
    scorer.close()  # a function that hangs in a thread ends with this process


def _verdict(found: list[Any], limit: float, trainer: A3POTrainer) -> str:
    names = ", ".join(trainer.reward_func_names)
    if not found:
        return (
            f"PROBLEM: {names} did not return within {limit:.0f} s: set reward_workers=1 or more and a "
            "reward_timeout, which replaces a process that hangs."
        )
    last = found[-1]
    if isinstance(last, A3POError):
        return f"PROBLEM: {last}"
    if isinstance(last, Rejection):
        return f"PROBLEM: {last.reason}. {last.remedy}."
    seconds = last.seconds
    if seconds > SLOW_REWARD and not trainer.args.reward_workers:
        return (
            f"WARNING: {names} took {seconds:.1f} s for one group of {trainer.num_generations} completions, in a "
            f"thread of the trainer's process: set reward_workers={max(2, (os.cpu_count() or 2) // 2)}."
        )
    return f"rewards: {names} scored a group in {seconds:.2f} s"


class _Warnings(logging.Handler):
    """Keeps what this package warns of inside a `with` block."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())

    def __enter__(self) -> "_Warnings":
        logging.getLogger("trl_a3po").addHandler(self)
        return self

    def __exit__(self, *exception: object) -> None:
        logging.getLogger("trl_a3po").removeHandler(self)
