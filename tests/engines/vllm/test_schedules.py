"""Every schedule on vLLM's stub servers: each token is of the version that the schedule says."""

import pytest
from peft import LoraConfig

from tests.engines.vllm.stub_server import StubServer
from tests.engines.vllm.test_training_on_stubs import trainer_on


def adapter(lora: bool) -> LoraConfig | None:
    return LoraConfig(r=2, target_modules="all-linear") if lora else None


def versions_of(trainer) -> list[tuple[int, set[int]]]:
    """Of every group: the version it was taken at, and those of its tokens."""
    return [(at, {v for rollout in group.rollouts for v in rollout.versions}) for at, group in trainer.groups]


@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
def test_periodic_trains_all_groups_of_a_period_on_the_version_it_began_with(tmp_path, lora):
    servers = [StubServer(lora=lora, step=0.005) for _ in range(2)]
    trainer = trainer_on(
        servers,
        tmp_path,
        schedule="periodic",
        gradient_accumulation_steps=2,
        loss_type="grpo",
        max_steps=4,
        peft_config=adapter(lora),
    )
    trainer.train()
    assert versions_of(trainer) == [(at, {at}) for at in range(4) for _ in range(2)]
    assert sorted(group.prompt.index for _, group in trainer.groups) == list(range(8))


@pytest.mark.parametrize("lag", [1, 2])
@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
def test_fixed_lag_trains_every_group_at_exactly_its_staleness(tmp_path, lora, lag):
    servers = [StubServer(lora=lora, step=0.005) for _ in range(2)]
    trainer = trainer_on(
        servers,
        tmp_path,
        schedule="fixed_lag",
        max_staleness=lag,
        gradient_accumulation_steps=2,
        max_steps=5,
        peft_config=adapter(lora),
    )
    trainer.train()
    assert versions_of(trainer) == [(at, {max(0, at - lag)}) for at in range(5) for _ in range(2)]
    assert [group.prompt.index for _, group in trainer.groups] == list(range(10))
