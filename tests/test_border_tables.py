"""Every method and every setting of TRL and transformers has a row, and what the row says holds."""

import inspect
from dataclasses import fields

import pytest
from accelerate.parallelism_config import ParallelismConfig
from transformers import Trainer
from trl import GRPOConfig, GRPOTrainer

from tests.runs import ScriptedGRPOTrainer, assert_same_gradients, build, train_recorded
from tests.tiny import tiny_prompts
from trl_a3po import A3POConfig, A3POTrainer
from trl_a3po.checks.overridden_methods import METHODS
from trl_a3po.config.border_rows import named
from trl_a3po.config.inherited_fields import FIELDS

pytestmark = pytest.mark.usefixtures("same_rows_in_each_micro_batch")


def overridable():
    """The methods of both trainers that a subclass can override."""
    names = {name for name in (*dir(GRPOTrainer), *dir(Trainer)) if not name.startswith("__")}
    return {name for name in names if callable(getattr(GRPOTrainer, name))}


@pytest.mark.parametrize(
    "rows, names", [(METHODS, overridable), (FIELDS, lambda: {field.name for field in fields(GRPOConfig)})]
)
def test_every_name_has_one_row(rows, names):
    listed = [name for name, _ in named(rows)]
    assert len(listed) == len(set(listed))
    assert names() - set(listed) == set(), "a library has added these: give each a row"
    assert set(listed) - names() == set(), "a library has removed these"


# --- methods --------------------------------------------------------------------------------------------------------


def recording(trainer_class, names):
    """The class with every method of `names` overridden: each call is noted, and super() does the work."""
    called = set()

    def override(name):
        def method(self, *args, **kwargs):
            called.add(name)
            return getattr(super(Recording, self), name)(*args, **kwargs)

        static = inspect.getattr_static(trainer_class, name)
        if isinstance(static, (staticmethod, classmethod)):
            inner = getattr(trainer_class, name)
            return staticmethod(lambda *args, **kwargs: (called.add(name), inner(*args, **kwargs))[1])
        return method

    Recording = type("Recording", (trainer_class,), {name: override(name) for name in names})
    return Recording, called


def train_recording(trainer_class, names, model, folder):
    recorded_class, called = recording(trainer_class, names)
    settings = {"eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 2}
    settings |= {"eval_dataset": tiny_prompts(4), "per_device_eval_batch_size": 4, "top_entropy_quantile": 0.8}
    settings |= {"include_num_input_tokens_seen": "all", "load_best_model_at_end": True, "max_steps": 4}
    trainer = build(model, folder, recorded_class, **settings)
    gradients = train_recorded(trainer)
    trainer.evaluate()
    trainer.predict(tiny_prompts(4))
    trainer.save_model()
    return called, gradients


def test_what_grpo_calls_of_the_followed_methods_is_called_here_and_trains_the_same(model_path, tmp_path):
    followed = [name for name, _ in named(METHODS, "followed")]
    theirs, expected = train_recording(ScriptedGRPOTrainer, followed, model_path, tmp_path)
    mine, gradients = train_recording(A3POTrainer, followed, model_path, tmp_path)
    assert len(theirs) > 50
    assert theirs - mine == set()
    assert_same_gradients(gradients, expected)


@pytest.mark.parametrize("name", [name for name, _ in named(METHODS, "refused")])
def test_a_refused_method_raises_at_construction(model_path, tmp_path, name):
    Own = type("Own", (A3POTrainer,), {name: lambda self, *args, **kwargs: None})
    with pytest.raises(ValueError, match=rf"Own\.{name} would be ignored, because "):
        build(model_path, tmp_path, Own)


def without_super(name):
    """A class whose method does the work of GRPOTrainer's, past A3POTrainer's."""

    def method(self, *args, **kwargs):
        return getattr(GRPOTrainer, name)(self, *args, **kwargs)

    return type("Own", (A3POTrainer,), {name: method})


@pytest.mark.parametrize(
    "name, message",
    [
        ("training_step", r"Own\.training_step does not call super\(\)"),
        ("train", r"Own\.train does not call super\(\)"),
        ("_prepare_inputs", r"_prepare_inputs does not call super\(\)"),
        ("_calculate_rewards", r"_calculate_rewards does not call super\(\)"),
        ("_get_per_token_logps_and_entropies", "the objective would not be applied"),
    ],
)
def test_a_method_that_has_to_call_super_and_does_not_ends_the_first_step(model_path, tmp_path, name, message):
    trainer = build(model_path, tmp_path, without_super(name))
    with pytest.raises(RuntimeError, match=message):
        trainer.train()
    assert trainer.state.global_step == 0


# --- settings -------------------------------------------------------------------------------------------------------

REFUSED_VALUES = {
    "cache_implementation": "static",
    "use_transformers_continuous_batching": True,
    "transformers_continuous_batching_config": {"num_blocks": 4},
    "use_transformers_paged": True,
    "auto_find_batch_size": True,
    "vllm_importance_sampling_correction": False,
    "vllm_importance_sampling_mode": "token_mask",
    "vllm_importance_sampling_clip_max": 9.0,
    "vllm_importance_sampling_clip_min": 0.5,
    "vllm_importance_sampling_cap": 9.0,
    "vllm_structured_outputs_regex": "a+",
    "vllm_enable_sleep_mode": True,
    "vllm_group_port": 4242,
    "save_on_each_node": True,
}
AT_CONSTRUCTION = {"parallelism_config"}  # tests/test_bad_input.py, tests of the launch


def test_a_refused_setting_raises_with_what_to_do(tmp_path):
    refused = {name for name, _ in named(FIELDS, "refused")}
    assert refused == {*REFUSED_VALUES, *AT_CONSTRUCTION}
    for name, value in REFUSED_VALUES.items():
        with pytest.raises(ValueError, match=r"leave it at|[Ss]et ") as error:
            A3POConfig(str(tmp_path), use_cpu=True, **{name: value})
        assert name in str(error.value) or "deprecated" not in str(error.value)


SPLIT = r"parallelism of size 2.*launch it with DDP, DeepSpeed ZeRO or FSDP2"


@pytest.mark.parametrize("kind", ["tp_size", "cp_size", "sp_size"])
def test_a_policy_that_is_split_is_refused_in_a_sentence(model_path, tmp_path, monkeypatch, kind):
    monkeypatch.setattr(A3POTrainer, f"get_{kind}", lambda self: 2)
    with pytest.raises(ValueError, match=SPLIT):
        build(model_path, tmp_path)


def test_a_parallelism_config_is_refused_before_anything_is_built(model_path, tmp_path):
    with pytest.raises(ValueError, match=SPLIT):
        build(model_path, tmp_path, parallelism_config=ParallelismConfig(tp_size=2))
    with pytest.raises(ValueError, match="does not support sequence-dim parallelism"):  # TRL's own
        build(model_path, tmp_path, parallelism_config=ParallelismConfig(cp_size=2))
