"""The reward functions of a run: in which process they run, and which arguments they receive with a group.

Guarantees: the functions receive completions as GRPOTrainer decodes them, and a copy of the trainer's state, which
they may change.
"""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import PreTrainedTokenizerBase, TrainerState
from trl.chat_template_utils import parse_response
from trl.data_utils import is_conversational
from trl.trainer.utils import get_callable_name

from trl_a3po.protocol.records import Group
from trl_a3po.rewards.outside_training import called_in_thread, ends_if_frozen
from trl_a3po.rewards.recorded import RecordedReward
from trl_a3po.rewards.scorer import RewardScorer
from trl_a3po.rewards.thread import RewardThread
from trl_a3po.rewards.worker_pool import RewardWorkers
from trl_a3po.rollout.batch_rows import messages_of
from trl_a3po.session.temporarily import temporarily

if TYPE_CHECKING:
    from trl_a3po.session.replay_hooks import ReplayHooks
    from trl_a3po.trainer import A3POTrainer


def build_scorer(
    trainer: "A3POTrainer",
    state: Callable[[Group], TrainerState],
    environments: Callable[[Group], list[Any] | None] = lambda group: None,
    running: Callable[[], float] | None = None,
) -> RewardScorer | RewardWorkers:
    """The scorer that runs the trainer's reward functions, in this process or in `reward_workers` other processes.
    `environments` gives the functions in this process the environments of a group's episodes; `running` is the clock
    of the limits."""
    args = trainer.args
    functions = [None if isinstance(func, RecordedReward) else func for func in reward_functions(trainer)]
    processes = trainer.accelerator.num_processes
    names, decode = trainer.reward_func_names, CompletionDecoder(trainer._tokenizer)

    # As a plain object: to load a TrainerState, each worker would import transformers and torch.
    def plain_state(group: Group) -> SimpleNamespace:
        return SimpleNamespace(**vars(state(group)))

    if not args.reward_workers or not any(functions):

        def own_process(column: int) -> RewardWorkers:
            return RewardWorkers(
                [functions[column]],
                [names[column]],
                decode,
                plain_state,
                workers=1,
                timeout=args.reward_timeout,
                stall_timeout=args.stall_timeout,
                processes=processes,
                otherwise="write the function without it",
            )

        return RewardScorer(
            functions,
            names,
            decode,
            state,
            timeout=args.reward_timeout,
            stall_timeout=args.stall_timeout,
            own_process=own_process,
            thread=trainer._reward_thread,
            watchdog=True,
            environments=environments,
            processes=processes,
            clock=running,
        )
    return RewardWorkers(
        functions,
        names,
        decode,
        plain_state,
        workers=args.reward_workers,
        timeout=args.reward_timeout,
        on_timeout=args.reward_on_timeout,
        stall_timeout=args.stall_timeout,
        processes=processes,
    )


def reward_functions(trainer: "A3POTrainer") -> list[Callable[..., Any] | None]:
    """The trainer's reward functions, with `None` in place of a reward model, which TRL runs itself, and a
    `RecordedReward` in place of the reward of an environment."""
    functions = [None if isinstance(func, (str, nn.Module)) else func for func in trainer.reward_funcs]
    recorded = [RecordedReward(name) for name in trainer.reward_func_names[trainer._recorded_from :]]
    return [*functions[: trainer._recorded_from], *recorded]


def recorded_columns(trainer: "A3POTrainer") -> dict[int, str]:
    """The columns of rewards that episodes give themselves, by number."""
    return dict(enumerate(trainer.reward_func_names[trainer._recorded_from :], start=trainer._recorded_from))


def add_recorded_reward(trainer: "A3POTrainer") -> None:
    """Give the reward of the trainer's rollout function a column beside those of reward functions, with weight 1, as
    TRL does for environments."""
    if trainer.rollout is None or trainer._recorded_from == 0:  # then it is the only column, and has it already
        return
    name = get_callable_name(trainer.rollout)
    trainer.reward_funcs.append(RecordedReward(name))
    trainer.reward_func_names.append(name)
    trainer.reward_processing_classes.append(None)
    trainer.reward_weights = torch.cat([trainer.reward_weights, torch.ones(1)])


def reward_list(reward_funcs: Any) -> list[Any]:
    """The argument `reward_funcs` as a list."""
    if reward_funcs is None:
        return []
    return list(reward_funcs) if isinstance(reward_funcs, list) else [reward_funcs]


def new_reward_thread() -> RewardThread:
    """The thread in which a trainer's reward functions are called, as long as the trainer lives."""
    return RewardThread()


@contextmanager
def scoring_outside_training(trainer: "ReplayHooks") -> Iterator[None]:
    """Inside, the trainer's reward functions are such that TRL may call them outside of training."""
    args = trainer.args
    functions = [
        func if isinstance(func, nn.Module) else called_in_thread(func, trainer._reward_thread)
        for func in trainer.reward_funcs
        if not isinstance(func, str)  # TRL has loaded the model that a name stands for
    ]
    timeout = args.stall_timeout if args.reward_timeout is None else args.reward_timeout
    with temporarily(trainer, reward_funcs=functions), ends_if_frozen(trainer.reward_func_names, timeout):
        yield


class PublishedStates:
    """group -> the trainer's state that its reward functions receive.

    It is the current state. With `schedule="fixed_lag"`, it is the state at the publish of the version from which the
    group was sampled, so that it does not depend on timing.
    """

    def __init__(self, trainer: "A3POTrainer"):
        self._trainer = trainer
        self._by_version: dict[int, TrainerState] = {}

    def __call__(self, group: Group) -> TrainerState:
        # A group that was saved by a run without a fixed lag has no state of its own.
        return state_snapshot(self._by_version.get(group.submitted_version, self._trainer.state))

    def published(self, version: int) -> None:
        """Note that `version` is about to be published. Main thread only."""
        args = self._trainer.args
        if args.lag is not None:
            kept = {old: state for old, state in self._by_version.items() if version - old <= args.max_staleness}
            self._by_version = kept | {version: state_snapshot(self._trainer.state)}


class CompletionDecoder:
    """group -> completions as reward functions receive them: strings, or lists with one assistant message.

    It works on a copy of the tokenizer, because the reward thread and the training loop decode at the same time.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase):
        self._tokenizer = copy.deepcopy(tokenizer)
        self._parses = any(getattr(tokenizer, name, None) for name in ("response_template", "response_schema"))

    def __call__(self, group: Group) -> list[Any]:
        if all(rollout.episode is not None for rollout in group.rollouts):
            return messages_of([(group, number) for number in range(len(group.rollouts))])
        completion_ids = [rollout.token_ids for rollout in group.rollouts]
        if not is_conversational({"prompt": group.prompt.example["prompt"]}):
            return self._tokenizer.batch_decode(completion_ids, skip_special_tokens=True)
        if self._parses:
            prefix = group.prompt.token_ids
            return [[parse_response(self._tokenizer, ids, prefix=prefix)] for ids in completion_ids]
        contents = self._tokenizer.batch_decode(completion_ids, skip_special_tokens=True)
        return [[{"role": "assistant", "content": content}] for content in contents]


def state_snapshot(state: TrainerState) -> TrainerState:
    """A copy that reward functions may change without an effect on the trainer (the entries of `log_history` are
    shared)."""
    snapshot = copy.copy(state)
    snapshot.log_history = list(state.log_history)
    snapshot.stateful_callbacks = copy.copy(state.stateful_callbacks)
    return snapshot
