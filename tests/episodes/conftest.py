"""What tests of episodes share."""

import pytest

from tests.episodes.playing import ScriptedEngine, runner_of


@pytest.fixture
def runner_for():
    """Starts runners of a rollout function, and closes them after the test."""
    runners = []

    def make(play, engine=None, **options):
        runners.append(runner_of(play, engine or ScriptedEngine(), **options))
        return runners[-1]

    yield make
    for runner in runners:
        runner.close()
        assert not runner._thread.is_alive()
