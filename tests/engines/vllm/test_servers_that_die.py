"""A run on two real servers that are killed and started again: nothing lost, versions right, work for both again."""

import os
import signal
import threading
import time

import pytest
import torch
from transformers import TrainerCallback

from recipes.benchmarks.vllm_server import VLLMServer
from tests.engines.vllm.conftest import START_TIMEOUT, serving
from tests.engines.vllm.real_runs import CheckingTrainer, KeepVersions, trainer_of
from tests.runs import logged
from tests.workers.processes import until
from trl_a3po.errors import EngineError

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(1200)]

SETTINGS = {"per_device_train_batch_size": 4, "num_generations": 4}
OUTAGE = 10.0


class At(TrainerCallback):
    """Does something after some steps."""

    def __init__(self, actions):
        self.actions = actions

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step in self.actions:
            self.actions[state.global_step]()


def started_again(*servers: VLLMServer) -> None:
    for server in servers:
        server.start()
    for server in servers:
        server.wait_until_ready(START_TIMEOUT)


def urls(servers: list[VLLMServer]) -> list[str]:
    return [server.server.url for server in servers]


@pytest.fixture(scope="module")
def adapter_servers(vllm_python, tied_model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("adapters")
    with serving(vllm_python, tied_model, folder, count=2, max_lora_rank=8, max_loras=4) as servers:
        yield servers


@pytest.fixture
def weights_servers(vllm_python, untied_model, tmp_path):
    with serving(vllm_python, untied_model, tmp_path, count=2, counts_tokens=True) as servers:
        yield servers


def check_versions(trainer: CheckingTrainer, *, later_parts: bool) -> None:
    """Every token's log-prob is that of the version it is stamped with, and of no other."""
    own, other = torch.tensor(trainer.own), torch.tensor(trainer.other)
    assert own.max() < 1e-3 and other.mean() > 10 * own.mean()
    assert not later_parts or max(trainer.later_parts, default=0.0) < 1e-3


def kill_at_work(trainer: CheckingTrainer, *servers: VLLMServer) -> None:
    """Kill servers while the first of them is in the middle of rollouts."""

    def wait_and_kill() -> None:
        member = next(
            m for m in trainer._session.engine._serving.pool.members if m.server.url == servers[0].server.url
        )
        until(lambda: member.load > 0)
        time.sleep(0.5)
        for server in servers:
            os.killpg(server.pid, signal.SIGKILL)

    threading.Thread(target=wait_and_kill, daemon=True).start()


def train_through_a_death(servers: list[VLLMServer], trainer_on) -> CheckingTrainer:
    """Kill the first server after step 2, have it back after step 4, and ask that it works again."""
    sampled = []

    def servers_live() -> float:
        return trainer._session.engine.stats().extra["servers_live"]

    def count() -> None:
        sampled.append([server.server.generated_tokens() for server in servers])

    def bring_back() -> None:
        until(lambda: servers_live() == 1)
        started_again(servers[0])
        until(lambda: servers_live() == 2)
        count()

    trainer = trainer_on(At({2: lambda: kill_at_work(trainer, servers[0]), 4: bring_back, 12: count}))
    trainer.train()
    assert sorted(group.prompt.index for _, group in trainer.groups) == list(range(12))
    assert trainer.outcomes.prompt_outcomes.get("trained") == 12 and not trainer.outcomes.open_prompts
    assert trainer.outcomes.count_attempts("failed") == 0
    assert logged(trainer, "a3po/vllm/servers_lost")[-1] == logged(trainer, "a3po/vllm/servers_back")[-1] == 1
    back, end = sampled
    first, second = (then - now for now, then in zip(back, end, strict=True))
    assert first > 0.2 * (first + second)
    return trainer


def test_a_run_with_whole_weights_outlives_a_server_and_uses_it_again(weights_servers, untied_model, tmp_path):
    trainer = train_through_a_death(
        weights_servers,
        lambda *callbacks: trainer_of(
            untied_model,
            tmp_path,
            False,
            *callbacks,
            vllm_server_urls=urls(weights_servers),
            max_steps=12,
            optim="sgd",
            learning_rate=0.02,
            max_grad_norm=1.0,
            **SETTINGS,
        ),
    )
    check_versions(trainer, later_parts=False)


def test_a_lora_run_outlives_a_server_and_uses_it_again(adapter_servers, tied_model, tmp_path):
    trainer = train_through_a_death(
        adapter_servers,
        lambda *callbacks: trainer_of(
            tied_model,
            tmp_path,
            True,
            *callbacks,
            vllm_server_urls=urls(adapter_servers),
            max_steps=12,
            **SETTINGS,
        ),
    )
    check_versions(trainer, later_parts=True)


def test_without_servers_the_run_ends_with_one_error_and_goes_on_from_its_checkpoint_on_fresh_ones(
    adapter_servers, tied_model, tmp_path
):
    kept = KeepVersions(count=16)

    def trainer_on(*callbacks):
        return trainer_of(
            tied_model,
            tmp_path,
            True,
            *callbacks,
            versions=kept,
            vllm_server_urls=urls(adapter_servers),
            vllm_outage_timeout=OUTAGE,
            save_strategy="steps",
            save_steps=2,
            **SETTINGS,
        )

    trainer = trainer_on(At({5: lambda: kill_at_work(trainer, *adapter_servers)}))
    with pytest.raises(EngineError, match=r"No vLLM server has been able to sample for 10 s.*resume from the last"):
        trainer.train()

    started_again(*adapter_servers)
    resumed = trainer_on()
    resumed.train(resume_from_checkpoint=True)
    assert resumed.state.global_step == 8
    began = resumed.groups[0][0]
    assert began in (4, 6)
    trained = [group.prompt.index for at, group in trainer.groups if at < began]
    trained += [group.prompt.index for _, group in resumed.groups]
    assert sorted(trained) == list(range(8))
    assert resumed.outcomes.prompt_outcomes.get("trained") == 8 and not resumed.outcomes.open_prompts
    check_versions(resumed, later_parts=True)
