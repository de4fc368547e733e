"""Instances of the user's environments: made when they are needed, used again, and closed.

Guarantees: an instance is used by one episode at a time, and every call of it is made in one thread, that in which it
was made; an instance whose episode failed is not used again; `close` of an instance, if it has one, is called exactly
once, whatever happened to its episode.
"""

import asyncio
import inspect
import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from trl_a3po.episodes.calls import Calls, CallThread

logger = logging.getLogger(__name__)

CLOSE_TIMEOUT = 5.0  # seconds for the `close` of one instance
NOT_TOOLS = ("reset", "get_reward", "close")

Factory = Callable[[], Any]


@dataclass(eq=False, slots=True)
class Environment:
    """An instance and the thread of its calls.

    Args:
        name: of its factory; `None` if there is only one.
        instance: what the factory returned.
        hangs: a call of the instance has taken too long, and may still be under way.
    """

    name: str | None
    instance: Any
    thread: CallThread = field(default_factory=CallThread)
    closed: bool = False
    hangs: bool = False

    def abandon_thread(self) -> None:
        """A call in the thread takes too long: make the next ones in another thread. The instance is not used again
        after its episode."""
        self.thread.end()
        self.thread, self.hangs = CallThread(), True

    def method(self, name: str) -> Callable[..., Any] | None:
        """The method `name`, if the class of the instance defines it."""
        return getattr(self.instance, name) if inspect.isfunction(getattr(type(self.instance), name, None)) else None

    def tools(self) -> dict[str, Callable[..., Any]]:
        """The methods that the policy may call: public functions of the class, without `NOT_TOOLS`."""
        names = [name for name, _ in inspect.getmembers(type(self.instance), predicate=inspect.isfunction)]
        return {name: getattr(self.instance, name) for name in names if is_tool(name)}


def is_tool(name: str) -> bool:
    """Whether the policy may call a method of an environment that has this name."""
    return not name.startswith("_") and name not in NOT_TOOLS


class EnvironmentPool:
    """The instances of a run. It belongs to one event loop.

    Args:
        factories: what makes an instance, by the name of the environment.
        calls: makes the calls of instances.
        instances: instances that exist already, by the name of the environment. They are closed like the others.
        uses_instances: whether episodes are given them.
    """

    def __init__(
        self,
        factories: Mapping[str | None, Factory],
        calls: Calls,
        instances: Mapping[str | None, Iterable[Any]],
        *,
        uses_instances: bool = True,
    ):
        self._factories = factories
        self._calls = calls
        made = {name: [Environment(name, instance) for instance in instances.get(name, ())] for name in factories}
        self._all = {environment for environments in made.values() for environment in environments}
        self._idle = made if uses_instances else {name: [] for name in factories}
        self._closing: set[asyncio.Task[None]] = set()

    @property
    def open(self) -> int:
        """Instances that exist and are not closed."""
        return len(self._all)

    async def take(self, name: str | None) -> Environment:
        """An instance of the environment `name` that no other episode has, until it is given back or retired.

        Raises:
            BaseException: what the factory raised.
        """
        if self._idle[name]:
            return self._idle[name].pop()
        thread = CallThread()
        # Shielded: an instance that is made after its episode was cancelled must be closed too.
        making = asyncio.ensure_future(self._make(name, thread))
        try:
            return await asyncio.shield(making)
        except asyncio.CancelledError:
            making.add_done_callback(self._retire_unused)
            raise

    def give_back(self, environment: Environment) -> None:
        """The instance may be used by another episode, which will reset it."""
        if environment.hangs:
            self.retire(environment)
        elif not environment.closed:
            self._idle[environment.name].append(environment)

    def retire(self, environment: Environment) -> None:
        """Close the instance, in the background."""
        task = asyncio.ensure_future(self._close(environment))
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    async def close(self) -> None:
        """Close every instance, those in use included. Takes bounded time."""
        for environment in list(self._all):
            self.retire(environment)
        await asyncio.gather(*self._closing)

    async def _make(self, name: str | None, thread: CallThread) -> Environment:
        try:
            environment = Environment(name, await self._calls.call(self._factories[name], thread), thread)
            self._check_new(environment.instance)
        except BaseException:
            thread.end()
            raise
        self._all.add(environment)
        return environment

    def _check_new(self, instance: Any) -> None:
        if any(other.instance is instance for other in self._all):
            raise ValueError(
                f"environment_factory returned the {type(instance).__name__} that another episode uses: it must "
                "return a new instance each time, because episodes are played at the same time"
            )

    def _retire_unused(self, making: "asyncio.Future[Environment]") -> None:
        if not making.cancelled() and making.exception() is None:
            self.retire(making.result())

    async def _close(self, environment: Environment) -> None:
        if environment.closed:
            return
        environment.closed = True
        self._all.discard(environment)
        close = environment.method("close")
        try:
            if close is not None:
                async with asyncio.timeout(CLOSE_TIMEOUT):
                    await self._call_close(environment, close)
        except TimeoutError:
            logger.warning(
                "close() of an environment of class %s did not return within %s s and is abandoned.",
                *(type(environment.instance).__name__, CLOSE_TIMEOUT),
            )
        except Exception as error:
            logger.warning("close() of a %s, an environment, raised %r.", type(environment.instance).__name__, error)
        finally:
            environment.thread.end()

    async def _call_close(self, environment: Environment, close: Callable[[], Any]) -> None:
        if inspect.iscoroutinefunction(close):
            await close()
            return
        # A call that hangs must not keep its instance from being closed.
        thread = CallThread() if environment.thread.busy else environment.thread
        try:
            _, error = await asyncio.wrap_future(thread.submit(partial(close)))
        finally:
            if thread is not environment.thread:
                thread.end()
        if error is not None:
            raise error
