"""Each setting that `A3POConfig` adds can change a run: for two of its values, something that a run is made of
differs.

A setting that changes nothing, or has no entry here, fails. The settings of an objective need no entry: their range
gives the values, and the record of the objective the settings that go with them.
"""

import math
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from tests.runs import build
from tests.tiny import tiny_config
from trl_a3po import A3POConfig
from trl_a3po.config.annotations import annotations
from trl_a3po.config.documentation import setting_rows
from trl_a3po.objectives.table import OBJECTIVES, SETTINGS_OF
from trl_a3po.publish.adapter_or_merged import publishes_merged
from trl_a3po.session import build_engine, build_episodes, build_queue, build_scorer
from trl_a3po.session.engine_gap import EngineGapOfRun

pytestmark = pytest.mark.long

VLLM = {"engine": "vllm"}
VLLM_SERVERS = {"engine": "vllm", "vllm_server_urls": ["http://127.0.0.1:8000"]}
WORKERS = {"reward_workers": 1, "reward_timeout": 5.0}
CASES = {  # setting -> (two values, the settings that go with them)
    "max_staleness": (4, 1, {}),
    "schedule": ("async", "sync", {}),
    "max_attempts": (3, 1, {}),
    "objective": ("decoupled", "aipo", {}),
    "proximal_method": ("loglinear", "behavior", {}),
    "fresh_proximal": ("behavior", "policy", {}),
    "behavior_weight_cap": (5.0, 1.05, {}),
    "behavior_weight_mode": ("truncate", "mask", {"behavior_weight_cap": 1.05}),
    "engine": ("transformers", "vllm", {}),
    "engine_device": (None, ["cpu", "cpu"], {}),
    "engine_dtype": (None, "bfloat16", {}),
    "engine_slots": (4, 8, {}),
    "engine_threads": (1, 2, {}),
    "engine_restarts": (3, 0, {}),
    "kv_on_publish": ("keep", "recompute", {}),
    "deterministic": (False, True, {"engine_max_prompt_tokens": 8}),
    "engine_max_prompt_tokens": (8, 16, {"deterministic": True}),
    "lora_sync": ("adapter", "merged", {}),
    "max_engine_gap": (None, 0.5, {}),
    "vllm_server_urls": (None, ["http://127.0.0.1:8000"], VLLM),
    "vllm_weight_transfer": ("auto", "disk", VLLM_SERVERS),
    "vllm_weights_dir": (None, "weights", VLLM_SERVERS),
    "vllm_python": (None, "python3", VLLM),
    "vllm_outage_timeout": (120.0, 60.0, VLLM_SERVERS),
    "tool_timeout": (None, 5.0, {}),
    "episode_timeout": (None, 5.0, {}),
    "tool_threads": (64, 2, {}),
    "environment_processes": (False, True, {}),
    "reward_workers": (0, 2, {}),
    "reward_timeout": (5.0, 6.0, {}),
    "reward_on_timeout": (None, 0.0, WORKERS),
    "drop_zero_variance_groups": (False, True, {}),
    "max_rejected_groups_in_a_row": (3, 5, {}),
    "stall_timeout": (600.0, 60.0, {}),
}
IN_A_RUN = {  # as above, of settings that show only in a run
    "weight_sync_steps": (1, 2, {}),
    "compare_proximal_every": (0, 1, {}),
    "delivery_check_steps": (0, 1, {}),
    "dry_run": (False, True, {}),
    "packed_forward": ("auto", "off", {}),
    "shared_prompt": ("auto", "off", {}),
    "log_all_metrics": (False, True, {}),
    "kept_rollouts": (0, 100, {}),
}
OF_AN_OBJECTIVE = {  # setting -> the objective it belongs to
    setting: objective
    for objective in OBJECTIVES.values()
    for setting in objective.arguments
    if setting in SETTINGS_OF[objective.name] and setting not in CASES
}


def config(**settings) -> A3POConfig:
    base = {"output_dir": "unused", "per_device_train_batch_size": 4, "num_generations": 4, "report_to": "none"}
    return A3POConfig(**{**base, "use_cpu": True, **settings})


PLAIN = (bool, int, float, str, tuple, list, Path, torch.device, torch.dtype, type(None))


class Parts:
    """Stands in for the classes that a session is built of, and keeps what they were given."""

    def __init__(self, monkeypatch):
        self.made: list = []
        for module, names in (
            (build_engine, ("TransformersEngine", "VLLMServers", "VLLMEngine", "SeveralEngines")),
            (build_queue, ("GenerationQueue", "GroupFilter")),
            (build_scorer, ("RewardScorer", "RewardWorkers")),
            (build_episodes, ("Calls", "ChatTemplates", "EpisodeRunner", "ToolRollout")),
        ):
            for name in names:
                monkeypatch.setattr(module, name, self.recorder(name))
        monkeypatch.setattr(
            build_queue, "take_clock", lambda trainer: SimpleNamespace(version_of_take=0, total_takes=9)
        )

    def recorder(self, name: str) -> type:
        made = self.made

        class Recorder:
            timeouts = close = interrupt = describe = seconds = stopped = starting = retire = None

            def __init__(self, *arguments, **options):
                plain = {key: repr(value) for key, value in options.items() if isinstance(value, PLAIN)}
                made.append((name, len(arguments), plain))

        return Recorder

    def of(self, args: A3POConfig) -> list:
        """What the engine, the queue, the scorer and the episodes of a run with `args` are built from."""
        self.made.clear()
        trainer = SimpleNamespace(
            args=args, reward_weights=torch.ones(1), on_group=None, reward_funcs=[len], reward_func_names=["len"],
            processing_class=None, _tokenizer=None, _reward_thread=None, _recorded_from=1, rollout=None, tools=[len],
            environment_factories=None, _standalone_tools=[len], _multi_environment=False, chat_template=None,
            chat_template_kwargs={}, max_completion_length=8, accelerator=SimpleNamespace(num_processes=1),
            _is_vlm=False, model=SimpleNamespace(config=SimpleNamespace(get_text_config=SimpleNamespace)),
        )  # fmt: skip
        engine = build_engine.build_engine(args, torch.device("cpu"))
        scorer = build_scorer.build_scorer(trainer, None)
        build_queue.build_queue(trainer, engine, None, scorer, SimpleNamespace(attempt=None), None)
        build_episodes.build_episodes(trainer, engine, None)
        return list(self.made)


def anchor_and_weight(args: A3POConfig) -> list:
    """What the objective gives to TRL's loss, for tokens of staleness 0 to 4 of a policy that has moved."""
    generator = torch.Generator().manual_seed(0)
    behavior = -3 * torch.rand(5, 6, generator=generator)
    policy = behavior + 0.3 * torch.randn(5, 6, generator=generator)
    staleness = torch.arange(5).unsqueeze(1).expand(5, 6)
    advantages, mask = torch.tensor([1.0, -1.0, 0.5, -0.5, 1.0]), torch.ones(5, 6)
    recomputed = policy + 0.1 if args.recomputes_proximal else None
    anchor, weight, _ = args.objective_record.anchor_and_weight(
        args, policy, behavior, staleness, advantages, mask,
        recomputed_logps=recomputed, epsilon_low=0.2, epsilon_high=0.2,
    )  # fmt: skip
    return [anchor.tolist(), weight.tolist()]


@pytest.fixture(scope="module")
def lora_policy():
    model = AutoModelForCausalLM.from_config(tiny_config(), dtype=torch.float32)
    return get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"]))


@pytest.mark.parametrize("setting", CASES)
def test_a_setting_changes_what_a_run_is_built_from(setting, monkeypatch, lora_policy):
    parts = Parts(monkeypatch)

    def observed(value) -> tuple:
        args = config(**{**others, setting: value})
        dtype = build_engine.engine_dtype(args, lora_policy, "no")
        largest_gap = EngineGapOfRun(args, lora_policy, "no").of_probes.limit
        return parts.of(args), anchor_and_weight(args), dtype, publishes_merged(args, lora_policy), largest_gap

    one, other, others = CASES[setting]
    assert observed(one) == observed(one)
    assert observed(one) != observed(other)


def other_values(setting: str) -> list:
    """Values of a setting of an objective: some near the bounds of its range, or its other choices."""
    (annotation,) = [annotation for annotation in annotations() if annotation.name == setting]
    default = A3POConfig.__dataclass_fields__[setting].default
    if annotation.range is None:
        return [value for value in (annotation.choices or (False, True)) if value != default]
    bounds = annotation.range
    numbers = (bounds.least, bounds.above + 1e-6, bounds.above + 0.01, bounds.most, bounds.below - 0.01, 10.0)
    return [number for number in map(annotation.type, filter(math.isfinite, numbers)) if number in bounds]


@pytest.mark.parametrize("setting", OF_AN_OBJECTIVE)
def test_a_setting_of_an_objective_changes_its_anchor_or_weight(setting):
    objective = OF_AN_OBJECTIVE[setting]
    needs = {need.setting: need.values[0] for need in objective.needs}
    as_default = config(objective=objective.name, **needs)
    others = [config(objective=objective.name, **needs, **{setting: value}) for value in other_values(setting)]
    assert any(anchor_and_weight(args) != anchor_and_weight(as_default) for args in others)


@pytest.mark.parametrize("setting", IN_A_RUN)
def test_a_setting_changes_a_run(setting, model_path, tmp_path):
    def observed(value) -> tuple:
        trainer = build(model_path, tmp_path, max_steps=2, max_staleness=1, **{**others, setting: value})
        trainer.train()
        names = {name for entry in trainer.state.log_history for name in entry if name.startswith("a3po/")}
        logged = {name for name in names if not re.match(r"a3po/d\d", name)}  # which staleness occurs, timing decides
        forward = trainer._training_forward.description(trainer.model)
        return forward, trainer.state.global_step, trainer.args.engine.published, logged, trainer._rollout_log.share

    one, other, others = IN_A_RUN[setting]
    assert observed(one) == observed(one)
    assert observed(one) != observed(other)


def test_every_setting_has_an_entry():
    assert {*CASES, *IN_A_RUN, *OF_AN_OBJECTIVE} == {row.name for row in setting_rows()}
    assert not CASES.keys() & IN_A_RUN.keys()
