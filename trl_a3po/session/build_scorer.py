"""The reward functions of a run: where they run, and what they are given beside a group.

Guarantees: they get completions as GRPOTrainer decodes them, and a copy of the trainer's state, theirs to change.
"""

import copy
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from torch import nn
from transformers import TrainerState
from trl.chat_template_utils import parse_response
from trl.data_utils import is_conversational

from trl_a3po.protocol.records import Group
from trl_a3po.rewards.scorer import RewardScorer
from trl_a3po.rewards.worker_pool import RewardWorkers


def build_scorer(trainer, state: Callable[[Group], TrainerState]) -> RewardScorer | RewardWorkers:
    """What runs the trainer's reward functions: this process, or `reward_workers` others."""
    args, functions = trainer.args, reward_functions(trainer)
    decode = CompletionDecoder(trainer.processing_class)
    if not args.reward_workers or not any(functions):
        return RewardScorer(
            functions,
            trainer.reward_func_names,
            decode,
            state,
            timeout=args.reward_timeout,
            stall_timeout=args.stall_timeout,
        )
    return RewardWorkers(
        functions,
        trainer.reward_func_names,
        decode,
        # As a plain object: for its class, each worker would import transformers and torch.
        lambda group: SimpleNamespace(**vars(state(group))),
        workers=args.reward_workers,
        timeout=args.reward_timeout,
        on_timeout=args.reward_on_timeout,
        stall_timeout=args.stall_timeout,
    )


def reward_functions(trainer) -> list[Callable[..., Any] | None]:
    """The trainer's reward functions, with `None` in place of a reward model, which TRL runs itself."""
    return [None if isinstance(func, nn.Module) else func for func in trainer.reward_funcs]


class PublishedStates:
    """group -> the trainer's state as its reward functions see it: the current one or, with a fixed lag, that at the
    publish of the version the group was sampled from, which no timing changes."""

    def __init__(self, trainer):
        self._trainer = trainer
        self._by_version: dict[int, TrainerState] = {}

    def __call__(self, group: Group) -> TrainerState:
        # A group saved by a run without a fixed lag has none of its own.
        return state_snapshot(self._by_version.get(group.submitted_version, self._trainer.state))

    def published(self, version: int) -> None:
        """`version` is about to be published; main thread only."""
        args = self._trainer.args
        if args.lag is not None:
            kept = {old: state for old, state in self._by_version.items() if version - old <= args.max_staleness}
            self._by_version = kept | {version: state_snapshot(self._trainer.state)}


class CompletionDecoder:
    """Group -> completions as reward functions receive them: text, or one assistant message each.

    It works on a copy of the tokenizer, because the reward thread and the training loop decode at the same time.
    """

    def __init__(self, tokenizer):
        self._tokenizer = copy.deepcopy(tokenizer)
        self._parses = any(getattr(tokenizer, name, None) for name in ("response_template", "response_schema"))

    def __call__(self, group: Group) -> list[Any]:
        completion_ids = [rollout.token_ids for rollout in group.rollouts]
        if not is_conversational({"prompt": group.prompt.example["prompt"]}):
            return self._tokenizer.batch_decode(completion_ids, skip_special_tokens=True)
        if self._parses:
            prefix = group.prompt.token_ids
            return [[parse_response(self._tokenizer, ids, prefix=prefix)] for ids in completion_ids]
        contents = self._tokenizer.batch_decode(completion_ids, skip_special_tokens=True)
        return [[{"role": "assistant", "content": content}] for content in contents]


def state_snapshot(state: TrainerState) -> TrainerState:
    """A copy that reward functions may change without effect (the entries of `log_history` are shared)."""
    snapshot = copy.copy(state)
    snapshot.log_history = list(state.log_history)
    snapshot.stateful_callbacks = dict(state.stateful_callbacks)
    return snapshot
