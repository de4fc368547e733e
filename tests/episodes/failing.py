"""Environments that fail at random. The module imports little, so that a process of its own has it soon."""

import os
import random
import signal
import threading
import time


class World:
    """Draws, from a seed, what fails, and counts `faults` and, of those that hang, the `hung_seconds`."""

    def __init__(self, seed: int, chance: float, hangs: bool = False):
        self._random, self._lock = random.Random(seed), threading.Lock()
        self._chance, self._hangs = chance, hangs
        self.over = threading.Event()
        self.faults, self.hung_seconds = 0, 0.0
        self.made: list = []
        self.used_after_close = False

    def may_fail(self, what: str) -> None:
        with self._lock:
            draw, delay = self._random.random(), self._random.random()
        if delay < 0.1:
            time.sleep(delay / 20)
        if draw < self._chance:
            began = time.monotonic()
            if self._hangs and delay < 0.5 and what != "factory":
                self.over.wait(60)
            with self._lock:
                self.faults += 1
                self.hung_seconds += time.monotonic() - began
            raise ConnectionError(what)

    def environment(self):
        self.may_fail("factory")
        made = Environment(self)
        with self._lock:
            self.made.append(made)
        return made


class Environment:
    def __init__(self, world: World):
        self._world, self.closes = world, 0

    def reset(self, **row):
        self._world.used_after_close |= self.closes > 0
        self._world.may_fail("reset")
        self.calls = 0

    def tool(self):
        self._world.used_after_close |= self.closes > 0
        self.calls += 1
        self._world.may_fail("tool")
        return self.calls

    def get_reward(self):
        self._world.may_fail("get_reward")
        return float(self.calls)

    def close(self):
        self.closes += 1
        self._world.may_fail("close")


class Apart(Environment):
    """An environment in a process of its own, which dies now and then."""

    def __init__(self, seed: int, chance: float):
        super().__init__(World(seed + os.getpid(), chance))
        self._chance = chance

    def tool(self):
        if random.random() < self._chance / 4:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().tool()
