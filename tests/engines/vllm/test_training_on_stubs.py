"""`A3POTrainer` on stub servers that die: nothing lost, versions right, and a run without servers can be resumed."""

import pytest
from peft import LoraConfig
from transformers import TrainerCallback

from tests.engines.vllm.stub_server import StubServer
from tests.runs import TakeRecorder, logged
from tests.tiny import save_tiny_model, tiny_prompts
from trl_a3po import A3POConfig
from trl_a3po.errors import EngineError

STEPS = 8


class At(TrainerCallback):
    """Does something once, after a step."""

    def __init__(self, step, action):
        self.step, self.action = step, action

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            self.action()


def trainer_on(servers, tmp_path, *callbacks, **settings) -> TakeRecorder:
    model = tmp_path / "model"
    adapter = settings.pop("peft_config", LoraConfig(r=2, target_modules="all-linear"))
    args = A3POConfig(
        output_dir=str(tmp_path / "run"),
        **{
            "engine": "vllm",
            "vllm_server_urls": [server.url for server in servers],
            "vllm_outage_timeout": 1.0,
            "delivery_check_steps": 0,  # a stub's log-probs are no model's
            "per_device_train_batch_size": 4,
            "num_generations": 4,
            "max_completion_length": 16,
            "max_staleness": 2,
            "max_steps": STEPS,
            "use_cpu": True,
            "report_to": "none",
            "save_strategy": "no",
            "logging_steps": 1,
            "disable_tqdm": True,
            "model_init_kwargs": {"dtype": "float32"},
            **settings,
        },
    )
    return TakeRecorder(
        str(model) if model.exists() else save_tiny_model(model),
        lambda completion_ids, **kwargs: [len(ids) / 16 for ids in completion_ids],
        args=args,
        train_dataset=tiny_prompts(),
        callbacks=list(callbacks),
        peft_config=adapter,
    )


def check_groups(groups, prompts) -> None:
    assert sorted(group.prompt.index for _, group in groups) == list(prompts)
    for taken_at, group in groups:
        for rollout in group.rollouts:
            assert all(taken_at - 2 <= version <= taken_at for version in rollout.versions)


def test_a_server_that_dies_and_comes_back_loses_nothing(tmp_path):
    servers = [StubServer(lora=True, step=0.02) for _ in range(2)]
    back = []
    trainer = trainer_on(servers, tmp_path, At(2, servers[0].kill), At(4, lambda: back.append(servers[0].restarted())))
    trainer.train()
    check_groups(trainer.groups, range(STEPS))
    assert logged(trainer, "a3po/vllm/servers_lost")[-1] >= 1
    assert not any(logged(trainer, "a3po/outcomes/failed"))
    assert len(back) == 1


def test_without_servers_the_run_ends_with_one_error_and_its_checkpoint_goes_on(tmp_path):
    servers = [StubServer(lora=True, step=0.02) for _ in range(2)]

    def kill():
        for server in servers:
            server.kill()

    saving = {"save_strategy": "steps", "save_steps": 2}
    trainer = trainer_on(servers, tmp_path, At(5, kill), **saving)
    with pytest.raises(EngineError, match=r"No vLLM server has been able to sample for 1 s.*resume from the last"):
        trainer.train()
    again = [StubServer(lora=True, step=0.02)]
    resumed = trainer_on(again, tmp_path, **saving)
    resumed.train(resume_from_checkpoint=True)
    assert resumed.state.global_step == STEPS
    first = [(at, group) for at, group in trainer.groups if at < resumed.groups[0][0]]
    check_groups(first + resumed.groups, range(STEPS))


@pytest.mark.parametrize("settings", [{"use_dora": True}, {"alpha_pattern": {"q_proj": 4}}])
def test_an_adapter_that_vllm_cannot_serve_is_sent_merged_and_said_so(tmp_path, settings, caplog):
    adapter = LoraConfig(**{"r": 2, "target_modules": ["q_proj", "o_proj"], **settings})
    server = StubServer()
    trainer = trainer_on([server], tmp_path, max_steps=2, peft_config=adapter)
    trainer.train()
    assert "published merged" in caplog.text
    assert server.calls.count("/collective_rpc") >= 2 and not server.adapters
