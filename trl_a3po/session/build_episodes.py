"""The episodes of a run, for trainers with tools, environments or a rollout function.

Guarantees: environments that TRL has made are closed with the others; what reward functions are given of an episode
belongs to it until its group has been scored.
"""

import asyncio
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import cloudpickle

from trl_a3po.checks.data import context_of
from trl_a3po.episodes.calls import Calls
from trl_a3po.episodes.environments import EnvironmentPool, is_tool
from trl_a3po.episodes.episode import RolloutFunction
from trl_a3po.episodes.runner import EpisodeRunner
from trl_a3po.episodes.templates import ChatTemplates
from trl_a3po.episodes.tools import ToolRollout
from trl_a3po.protocol.engine import Engine, SamplingSettings
from trl_a3po.protocol.records import Group
from trl_a3po.rollout.batch_rows import Row
from trl_a3po.session.prompt_images import image_rules
from trl_a3po.workers.remote_object import RemoteObjects

if TYPE_CHECKING:
    from trl_a3po.session.checkpoint_hooks import CheckpointHooks
    from trl_a3po.trainer import A3POTrainer


@dataclass(frozen=True)
class Episodes:
    """What plays the episodes of a run.

    Args:
        runner: plays them.
        tools: calls TRL's tools and environments; `None` with a rollout function.
    """

    runner: EpisodeRunner
    tools: ToolRollout | None
    _scored: dict[int, Any] = field(default_factory=dict)  # environments of scored episodes that may yet be taken

    def environments(self, group: Group) -> list[Any] | None:
        """The environments of a group that is being scored, as reward functions receive them; `None` if there are
        none."""
        return None if self.tools is None else self.tools.environments(_keys(group))

    def scored(self, group: Group) -> None:
        """The group has been scored: its environments are free."""
        if self.tools is not None:
            keys = list(_keys(group))
            self._scored.update(zip(keys, self.tools.environments(keys) or (), strict=False))
            self.runner.call(self.tools.give_back, keys)

    def taken(self, rows: Sequence[Row]) -> list[Any]:
        """The environments in which the rows of a batch were played, for `trainer.environments`; `None` for one that
        is not known any more. An environment may have been used again since."""
        played = [group.rollouts[number].episode for group, number in rows]
        keys = [-1 if episode is None else episode.key for episode in played]
        found = [self._scored.get(key) for key in keys]
        for key in [key for key in list(self._scored) if key <= max(keys)]:
            del self._scored[key]
        return found


def runs_episodes(trainer: "CheckpointHooks") -> bool:
    """Whether a rollout of this trainer may have several turns."""
    return bool(trainer.tools or trainer.environment_factories or trainer.rollout)


def build_episodes(trainer: "A3POTrainer", engine: Engine, sampling: SamplingSettings) -> Episodes | None:
    """The episodes of the trainer's run; `None` if its rollouts have one turn."""
    if not runs_episodes(trainer):
        return None
    args = trainer.args
    if trainer.rollout is not None:
        templates = _templates_of_rollout_function(trainer)
        return Episodes(_runner(trainer, engine, sampling, trainer.rollout, templates), None)
    templates = ChatTemplates(
        trainer.processing_class,
        chat_template=trainer.chat_template,
        chat_template_kwargs=trainer.chat_template_kwargs,
        tools=trainer.tools,
        environment_tools=trainer._env_tools if trainer.environment_factories else None,
        image_rules=image_rules(trainer),
    )
    calls, pool = Calls(limit=args.tool_threads), None
    processes = RemoteObjects() if args.environment_processes else None
    if trainer.environment_factories:
        factories = _factories(trainer, processes)
        pool = EnvironmentPool(factories, calls, trainer._environment_pool, uses_instances=processes is None)
        trainer._environment_pool = {name: [] for name in trainer.environment_factories}
    tools = ToolRollout(
        trainer._standalone_tools,
        templates,
        calls,
        pool=pool,
        environment_tools=trainer._env_tools if pool else None,
        several=trainer._multi_environment,
        max_iterations=args.max_tool_calling_iterations,
        tool_timeout=args.tool_timeout,
        processes=processes,
    )
    return Episodes(_runner(trainer, engine, sampling, tools, templates, tools), tools)


def remove_close_from_tools(trainer: "CheckpointHooks") -> None:
    """Take the method `close` of environments, which ends them, out of the tools that TRL has found."""
    if not trainer.environment_factories:
        return
    closes = [
        tool
        for tools in trainer._env_tools.values()
        for tool in tools
        if tool not in trainer._standalone_tools and not is_tool(tool.__name__)
    ]
    trainer.tools = [tool for tool in trainer.tools if tool not in closes]
    trainer._env_tools = {
        name: [tool for tool in tools if tool not in closes] for name, tools in trainer._env_tools.items()
    }


def _factories(trainer: "A3POTrainer", processes: RemoteObjects | None) -> Mapping[str | None, Callable[[], Any]]:
    """What makes an environment, by its name: in this process, or in one of its own."""
    if processes is None:
        return trainer.environment_factories
    pickled = {name: cloudpickle.dumps(factory) for name, factory in trainer.environment_factories.items()}
    return {name: partial(processes.make, factory) for name, factory in pickled.items()}


@contextmanager
def closing_environments_on_error(trainer: "A3POTrainer") -> Iterator[None]:
    """Inside, where a trainer is built, an error closes the environments that TRL has made to look at their tools."""
    try:
        yield
    except BaseException:
        if (instances := vars(trainer).get("_environment_pool")) is not None:  # TRL may have failed before
            pool = EnvironmentPool(trainer.environment_factories, Calls(limit=1), instances)
            with ThreadPoolExecutor(1) as thread:  # a notebook has an event loop in this one
                thread.submit(asyncio.run, pool.close())
        raise


def _runner(
    trainer: "A3POTrainer",
    engine: Engine,
    sampling: SamplingSettings,
    play: RolloutFunction,
    templates: ChatTemplates,
    tools: ToolRollout | None = None,
) -> EpisodeRunner:
    hooks = {} if tools is None else {"dropped": tools.retire, "closing": tools.close}
    return EpisodeRunner(
        engine,
        play,
        reward_name=trainer.reward_func_names[-1],
        templates=templates,
        max_completion_length=trainer.max_completion_length,
        sampling=sampling,
        context=context_of(trainer.args, trainer.model.config.get_text_config()),
        episode_timeout=trainer.args.episode_timeout,
        **hooks,  # type: ignore[arg-type]  # two hooks of different types
    )


def _templates_of_rollout_function(trainer: "A3POTrainer") -> ChatTemplates:
    """Templates that parse tool calls, and add messages, where the tokenizer's own is one that TRL knows."""
    processing_class, chat_template = trainer.processing_class, trainer.chat_template
    templates = ChatTemplates(
        processing_class,
        chat_template=chat_template,
        chat_template_kwargs=trainer.chat_template_kwargs,
        image_rules=image_rules(trainer),
    )
    if processing_class.chat_template is not None and chat_template is None:
        templates.adapt()
    return templates


def _keys(group: Group) -> Iterable[int]:
    return (rollout.episode.key for rollout in group.rollouts if rollout.episode is not None)
