"""Wrong settings and data: each ends in one sentence that names it, as early as it can be known.

`BUILT` are refused when the trainer is built, `RUN` when the row or completion in question is met; settings that
`A3POConfig` refuses by itself are also in `test_config.py`.
"""

import math
import re
from types import SimpleNamespace

import pytest
import torch
from datasets import Dataset, IterableDataset
from peft import LoHaConfig, LoraConfig, PromptTuningConfig, ShiraConfig, get_peft_model
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    GPT2Config,
    MambaConfig,
    OPTConfig,
    ProcessorMixin,
)

from tests.runs import COMPLETE, build, logged
from tests.tiny import VOCAB, save_tiny_model, tiny_config, tiny_prompts, tiny_tokenizer
from trl_a3po import A3POConfig, A3POTrainer
from trl_a3po.checks.policy import check_evaluated, check_sharding, check_shards, check_trained_before
from trl_a3po.errors import EngineError, RewardError, StampError
from trl_a3po.protocol.records import Rollout
from trl_a3po.testing import StubEngine

FSDP2 = {"fsdp_version": 2, "activation_checkpointing": False}


def prompts(*values) -> Dataset:
    return Dataset.from_dict({"prompt": list(values), "target": list(range(len(values)))})


def stream(*rows) -> IterableDataset:
    return IterableDataset.from_generator(lambda: iter(rows))


def model_of(auto_class, config=None):
    return auto_class.from_config(config or tiny_config())


class Engine(StubEngine):
    """Changes what it samples: `change(engine, rollouts)`."""

    def __init__(self, change):
        super().__init__(COMPLETE)
        self.change = change

    def _rollouts(self, request):
        return self.change(self, super()._rollouts(request))


class HalfAnEngine:
    def start(self, spec, sampling, update): ...
    def submit(self, requests): ...


class Processor(ProcessorMixin):
    def __init__(self):
        self.tokenizer = tiny_tokenizer()


def one_stamp(offset):
    def change(engine, rollouts):
        rollouts[0].versions[0] = engine.version + offset
        return rollouts

    return Engine(change)


def tokens(*token_ids):
    def change(engine, rollouts):
        return [Rollout(list(token_ids), [-1.0] * len(token_ids), [engine.version] * len(token_ids))] * len(rollouts)

    return Engine(change)


async def play(episode):
    return 1.0


def returning(value):
    """A reward function that returns `value`, or what it gives when called."""

    def graded(completions, **kwargs):
        return value() if callable(value) else value

    return graded


def chat_tokenizer():
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{{ messages }}"
    return tokenizer


MESSAGES = [{"role": "user", "content": "w1 w2"}]
IMAGE = [{"role": "user", "content": [{"type": "image", "image": "w1"}, {"type": "text", "text": "w1"}]}]

# name: (model or None for the usual one, settings, error, its words)
BUILT = {
    # data
    "no prompt column": (
        None, {"train_dataset": tiny_prompts().rename_column("prompt", "question")}, ValueError,
        "train_dataset has the columns question, target, but no 'prompt': rename the column"),
    "no prompt column to evaluate": (
        None, {"eval_dataset": {"long": tiny_prompts(), "odd": Dataset.from_dict({"q": ["w1"]})}}, ValueError,
        "eval_dataset['odd'] has the columns q, but no 'prompt'"),
    "empty prompt": (
        None, {"train_dataset": prompts("w1", "", "w2", "w3")}, ValueError,
        "Row 1 of train_dataset: "
        "A prompt has no tokens, so nothing can be sampled from it: correct or remove the row "
        "{'prompt': ''}"),
    "missing prompt": (
        None, {"train_dataset": prompts("w1", None, "w2", "w3")}, ValueError,
        "Row 1 of train_dataset: "
        "The prompt None is neither text nor a list of messages with 'role' and 'content': correct or remove the row "
        "{'prompt': None}"),
    "prompt beyond the context": (
        None, {"train_dataset": prompts("w1", "w7 " * 128, "w2", "w3")}, ValueError,
        "Row 1 of train_dataset: "
        "A prompt of 128 tokens leaves no room for a completion in the model's context of 128 tokens: "
        "shorten or remove the row {'prompt': 'w7 w7"),
    "prompt beyond the engine's longest": (
        None, {"train_dataset": prompts("w1", "w7 w8 w9", "w2"), "engine_max_prompt_tokens": 2}, ValueError,
        "Row 1 of train_dataset: "
        "A prompt has 3 tokens, more than engine_max_prompt_tokens=2: raise it, or shorten or remove the row"),
    "a column with the name of an argument of reward functions": (
        None, {"train_dataset": tiny_prompts().add_column("completions", ["gold"] * 32)}, ValueError,
        "train_dataset has a column 'completions', but every reward function receives an argument of that name"),
    "images column": (
        None, {"train_dataset": tiny_prompts().add_column("images", [None] * 32)}, ValueError,
        "train_dataset has a column 'images', but processing_class is a TokenizersBackend, which cannot show "
        "images: pass the processor of a vision-language model"),
    "fewer rows than a batch": (
        None, {"train_dataset": tiny_prompts(1)}, ValueError, "train_dataset has 1 rows, fewer than the 2 prompts"),
    "no rows": (
        None, {"train_dataset": tiny_prompts().select([])}, ValueError, "train_dataset has 0 rows"),
    "prompt that is a number": (
        None, {"train_dataset": prompts(1, 2)}, ValueError, "The prompt 1 is neither text nor a list of messages"),
    "prompt without messages": (
        None, {"train_dataset": prompts([], [])}, ValueError, "The prompt [] is neither text nor a list of messages"),
    "messages without a template": (
        None, {"train_dataset": prompts(MESSAGES, MESSAGES)}, ValueError,
        "the tokenizer has no chat_template to format them with: set processing_class.chat_template"),
    "a stream without max_steps": (
        None, {"train_dataset": stream({"prompt": "w1"}), "max_steps": -1}, ValueError,
        "max_steps has to be specified"),
    "a stream that may end inside an optimizer step": (
        None, {"train_dataset": stream({"prompt": "w1"}), "steps_per_generation": 1}, ValueError,
        "set steps_per_generation to a multiple of gradient_accumulation_steps=2"),
    "a dict of datasets": (
        None, {"train_dataset": {"train": tiny_prompts()}}, TypeError, "must be a `Dataset` or `IterableDataset`"),
    # batches
    "batch not divisible": (
        None, {"per_device_train_batch_size": 3, "gradient_accumulation_steps": 1}, ValueError,
        "generation_batch_size (3) must be divisible by num_generations (4)"),
    "evaluation batch not divisible": (
        None, {"eval_strategy": "steps", "eval_dataset": tiny_prompts(), "per_device_eval_batch_size": 3}, ValueError,
        "must be divisible by the number of generations used for evaluation (4)"),
    "a publish interval that can never fill a batch": (
        None, {"weight_sync_steps": 3, "max_staleness": 1}, ValueError, "can never fill a batch"),
    "reuse with two steps a batch": (
        None, {"proximal_method": "reuse", "num_iterations": 2}, ValueError,
        "proximal_method='reuse' with 2 optimizer"),
    # lengths
    "prompts and completions longer than the context": (
        None, {"engine_max_prompt_tokens": 125}, ValueError, "with prompts of up to 125 tokens does not fit"),
    "deterministic without a longest prompt": (
        None, {"deterministic": True}, ValueError,
        "set engine_max_prompt_tokens to the length of your longest prompt"),
    # names and values
    "unknown schedule": (None, {"schedule": "eager"}, ValueError, "schedule='eager' is not known"),
    "unknown objective": (None, {"objective": "ppo"}, ValueError, "objective='ppo' is not known"),
    "unknown engine": (None, {"engine": "sglang"}, ValueError, "engine='sglang' is not known"),
    "unknown generation_kwargs": (
        None, {"generation_kwargs": {"num_beams": 4}}, ValueError, "generation_kwargs holds num_beams"),
    "generation_kwargs with a field of its own": (
        None, {"generation_kwargs": {"temperature": 0.5}}, ValueError, "set temperature in A3POConfig"),
    "top_p of 0": (None, {"top_p": 0.0}, ValueError, "top_p=0.0 cannot be sampled with: it must be above 0"),
    "min_p above 1": (None, {"min_p": 1.5}, ValueError, "min_p=1.5 cannot be sampled with"),
    "min_new_tokens above the length": (
        None, {"generation_kwargs": {"min_new_tokens": 9}}, ValueError, "min_new_tokens=9 cannot be sampled with"),
    "a suppressed token that does not exist": (
        None, {"generation_kwargs": {"suppress_tokens": [VOCAB]}}, ValueError, "suppress_token_ids"),
    "two-sided clipping": (None, {"delta": 4.0}, ValueError, "which delta=4.0 breaks"),
    # engine
    "an engine without its methods": (
        None, {"engine": HalfAnEngine()}, ValueError,
        "engine is a HalfAnEngine without wait, cancel, publish"),
    "an engine's class": (None, {"engine": StubEngine}, ValueError, "engine=StubEngine is a class: pass an object"),
    "no engine": (None, {"engine": None}, ValueError, "engine is a NoneType without start"),
    "an engine device that does not exist": (
        None, {"engine": "transformers", "engine_device": "gpu"}, ValueError, "engine_device='gpu' is not a device"),
    "an engine device that is not there": (
        None, {"engine": "transformers", "engine_device": "cuda:99"}, ValueError,
        "engine_device='cuda:99' does not exist here"),
    # model
    "a module": (torch.nn.Linear(2, 2), {}, TypeError, "model is a Linear: pass a model name, a folder"),
    "a model without a head": (model_of(AutoModel), {}, ValueError, "model is a LlamaModel, which has no head"),
    "a classifier": (
        model_of(AutoModelForSequenceClassification), {}, ValueError,
        "model is a LlamaForSequenceClassification, which has no head to generate text"),
    "a compiled model": (
        lambda: torch.compile(model_of(AutoModelForCausalLM), backend="eager"), {}, ValueError,
        "model was compiled by torch.compile: pass the original model and set torch_compile=True"),
    "a state-space model": (
        lambda: model_of(AutoModelForCausalLM, MambaConfig(
            vocab_size=VOCAB, hidden_size=32, num_hidden_layers=2, state_size=8, eos_token_id=1, pad_token_id=0,
            bos_token_id=None)),
        {"engine": "transformers"}, ValueError, "The transformers engine cannot sample from 'mamba' models"),
    "a model that counts padding as positions": (
        lambda: model_of(AutoModelForCausalLM, GPT2Config(
            vocab_size=VOCAB, n_positions=64, n_embd=32, n_layer=1, n_head=4, eos_token_id=1, bos_token_id=None)),
        {}, ValueError, "The log-probs of a 'gpt2' model change by up to"),
    "a processor without images": (
        None, {"processing_class": Processor()}, ValueError,
        "processing_class is a Processor, which prepares no images"),
    "virtual tokens": (
        None, {"peft_config": PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)}, ValueError,
        "peft_config is a PromptTuningConfig"),
    "an adapter on the output layer": (
        None, {"peft_config": LoraConfig(target_modules=["lm_head"])}, ValueError, "`lm_head` is not supported"),
    "an adapter that cannot be merged": (
        None, {"peft_config": LoHaConfig(target_modules=["q_proj"]), "lora_sync": "merged"}, ValueError,
        "Set lora_sync='adapter'"),
    "an adapter that vLLM cannot serve and that cannot be merged": (
        None, {"peft_config": LoHaConfig(target_modules=["q_proj"]), "engine": "vllm"}, ValueError,
        "Set engine='transformers', or use LoraConfig on linear layers"),
    "virtual tokens that would be merged": (
        None, {"peft_config": PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4), "lora_sync": "merged"},
        ValueError, "peft_config is a PromptTuningConfig"),
    "an adapter that repeats layers": (
        None, {"peft_config": LoraConfig(target_modules=["q_proj"], layer_replication=[[0, 2], [0, 2]])}, ValueError,
        "with a LoraConfig that is built from its configuration has in addition"),
    "an adapter that reads the weights when it is made": (
        None, {"peft_config": ShiraConfig(target_modules=["q_proj"], r=2)}, ValueError,
        "with a ShiraConfig cannot be built without its weights"),
    "several active adapters": (
        lambda: _two_adapters(), {}, ValueError, "exactly one can be trained: call `model.set_adapter(name)` first"),
    # rewards, tools
    "a reward that cannot be called": (
        None, {"reward_funcs": [0.5]}, TypeError, "reward_funcs holds 0.5, which cannot be called"),
    "no reward": (None, {"reward_funcs": None}, ValueError, "No reward source provided"),
    "weights for other rewards": (
        None, {"reward_weights": [1.0, 2.0]}, ValueError, "Number of reward weights (2) must match"),
    "a tool that is no function": (None, {"tools": ["search"]}, TypeError, "tools holds 'search', which cannot be"),
    "two tools of one name": (
        None, {"tools": [print, print]}, ValueError, "tools holds 2 functions named 'print', and the policy calls"),
    "an environment that is made already": (
        None, {"environment_factory": {"a": object()}}, TypeError,
        "environment_factory['a'] is <object object at"),
    "one tool": (None, {"tools": print}, TypeError, "is not a list: pass a list of functions"),
    "rollout_func": (
        None, {"rollout_func": print}, ValueError, "Write it as `async def rollout(episode)`, which plays one"),
    "rollout_func beside tools": (
        None, {"rollout_func": play, "tools": [print]}, ValueError, "rollout_func and tools cannot both be set"),
}  # fmt: skip


def _two_adapters():
    model = get_peft_model(model_of(AutoModelForCausalLM), LoraConfig(target_modules=["q_proj"]))
    model.add_adapter("second", LoraConfig(target_modules=["q_proj"]))
    model.base_model.set_adapter(["default", "second"])
    return model


@pytest.mark.parametrize("model, settings, error, words", BUILT.values(), ids=BUILT.keys())
def test_refused_when_the_trainer_is_built(model_path, tmp_path, model, settings, error, words):
    engine = StubEngine(COMPLETE)
    if callable(model) and not isinstance(model, torch.nn.Module):
        model = model()
    if model is not None:
        settings = {"processing_class": tiny_tokenizer(), **settings}
    with pytest.raises(error, match=re.escape(words)) as refusal:
        build(model_path if model is None else model, tmp_path, **{"engine": engine, **settings})
    assert_one_message(refusal.value)
    assert engine.published == []


def assert_one_message(error):
    text = str(error)
    assert "Traceback" not in text and "\n" not in text.strip() and len(text) < 700


# name: (settings, error, its words)
RUN = {
    # data
    "a message with an image": (
        {"train_dataset": stream({"prompt": IMAGE}, {"prompt": IMAGE}), "processing_class": chat_tokenizer()},
        ValueError,
        "A message contains an image, but processing_class is a TokenizersBackend, which cannot show it"),
    "a stream without prompts": (
        {"train_dataset": stream(*[{"question": "w1"}] * 4)}, ValueError, "the columns question, but no 'prompt'"),
    "a stream shorter than a batch": (
        {"train_dataset": stream({"prompt": "w1"})}, ValueError,
        "train_dataset holds fewer than the 2 prompts of one generation batch"),
    # rewards
    "one reward for a group": (
        {"reward_funcs": returning([1.0])}, RewardError, "'graded' returned 1 rewards for a group of 4 completions"),
    "rewards that are text": (
        {"reward_funcs": returning(["good"] * 4)}, RewardError, "returned the string 'good' for completion 0"),
    "a reward that is no list": ({"reward_funcs": returning(1.0)}, RewardError, "'graded' returned a float"),
    "a reward that is a list": (
        {"reward_funcs": returning([[1.0]] * 4)}, RewardError, "'graded' returned a list for completion 0"),
    "rewards left out": ({"reward_funcs": returning(None)}, RewardError, "'graded' returned None instead of a list"),
    "a reward that raises": (
        {"reward_funcs": returning(lambda: {}["gold"])}, RewardError, "'graded' raised KeyError('gold')"),
    "a reward that is NaN": (
        {"reward_funcs": returning([0.0, math.nan, 0.0, 0.0])}, RewardError, "'graded' returned nan for completion 1"),
    "an infinite reward": (
        {"reward_funcs": returning([0.0, 0.0, 0.0, math.inf])}, RewardError, "'graded' returned inf for completion 3"),
    "a reward without **kwargs": (
        {"reward_funcs": lambda completions: [0.0] * 4}, RewardError, "unexpected keyword argument"),
    # engine
    "a NaN log-prob": (
        {"engine": Engine(lambda e, rs: [Rollout(r.token_ids, [math.nan] * len(r.logps), r.versions) for r in rs])},
        EngineError, "The log-prob of completion token 0 is nan"),
    "a positive log-prob": (
        {"engine": Engine(lambda e, rs: [Rollout(r.token_ids, [0.5] * len(r.logps), r.versions) for r in rs])},
        EngineError, "The log-prob of completion token 0 is 0.5"),
    "an empty completion": (
        {"engine": Engine(lambda e, rs: [Rollout([], [], []) for r in rs])}, EngineError,
        "the engine returned an empty completion"),
    "misaligned lists": (
        {"engine": Engine(lambda e, rs: [Rollout(r.token_ids, r.logps, [*r.versions, 0]) for r in rs])}, EngineError,
        "The lists of a rollout must be aligned token by token"),
    "too few rollouts": (
        {"engine": Engine(lambda e, rs: rs[:2])}, EngineError,
        "returned 2 rollouts for prompt 0, but 4 were requested"),
    "rollouts of another kind": (
        {"engine": Engine(lambda e, rs: [([4], [-1.0], [0])] * 4)}, EngineError, "returned a tuple for prompt 0"),
    "a token outside the vocabulary": (
        {"engine": tokens(5, VOCAB)}, EngineError,
        "with token ids from 5 to 64, but the model's vocabulary is 0 to 63"),
    "a negative token": ({"engine": tokens(5, -3)}, EngineError, "holds the token id -3: token ids are 0 or more"),
    "a completion that is too long": (
        {"engine": tokens(*[5] * 9)}, EngineError, "of 9 tokens, more than max_completion_length=8"),
    "a stamp above the trainer's version": (
        {"engine": one_stamp(+1)}, StampError, "with version 1, but the trainer is at version 0"),
    "a stamp below -1": ({"engine": one_stamp(-2)}, StampError, "stamped a token with version -2"),
    "a token that no policy sampled": (
        {"engine": one_stamp(-1)}, EngineError, "that holds tokens of version -1, which no policy sampled"),
}  # fmt: skip


@pytest.mark.parametrize("settings, error, words", RUN.values(), ids=RUN.keys())
def test_refused_with_the_row_or_the_completion(model_path, tmp_path, settings, error, words):
    with pytest.raises(error, match=re.escape(words)) as refusal:
        build(model_path, tmp_path, shuffle_dataset=False, **settings).train()
    assert_one_message(refusal.value)


def test_a_model_without_rotary_positions_that_follows_the_mask_is_trained(tmp_path):
    config = OPTConfig(
        vocab_size=VOCAB, hidden_size=32, ffn_dim=64, num_hidden_layers=1, num_attention_heads=4, dropout=0.0,
        max_position_embeddings=64, word_embed_proj_dim=32, init_std=0.3, eos_token_id=1, pad_token_id=0,
        bos_token_id=None,
    )  # fmt: skip
    trainer = build(model_of(AutoModelForCausalLM, config), tmp_path, processing_class=tiny_tokenizer())
    trainer.train()
    assert max(abs(value - 1) for value in logged(trainer, "a3po/rho/max")) < 1e-4


def test_a_tokenizer_of_another_model_is_refused(tmp_path):
    small = save_tiny_model(tmp_path / "small", vocab_size=32)
    with pytest.raises(ValueError, match="model's vocabulary is 0 to 31: pass the model's own tokenizer"):
        build(small, tmp_path).train()


def test_a_second_training_under_deepspeed_is_refused():
    check_trained_before(True, False)
    check_trained_before(False, True)
    with pytest.raises(ValueError, match=r"second time under DeepSpeed.*create a new"):
        check_trained_before(True, True)


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"fsdp_version": 1}, r"fsdp_version=1.*set fsdp_version: 2"),
        ({"activation_checkpointing": True}, r"fsdp_activation_checkpointing: true.*gradient_checkpointing=True"),
    ],
)
def test_a_launch_whose_shards_cannot_be_published_is_refused(options, what):
    check_sharding(None)
    check_sharding(SimpleNamespace(**FSDP2))
    with pytest.raises(ValueError, match=what):
        check_sharding(SimpleNamespace(**(FSDP2 | options)))


def test_a_model_that_fsdp_cannot_shard_for_publishing_is_refused(tmp_path):
    model, args = AutoModelForCausalLM.from_config(tiny_config()), A3POConfig(str(tmp_path), use_cpu=True)
    check_shards(args, True, model)
    args.torch_compile = True
    check_shards(args, False, model)
    with pytest.raises(ValueError, match=r"torch_compile=True cannot hold under FSDP2.*set torch_compile=False"):
        check_shards(args, True, model)


def test_an_evaluation_before_training_is_refused_under_fsdp():
    model = AutoModelForCausalLM.from_config(tiny_config())
    check_evaluated(False, model)
    with pytest.raises(ValueError, match=r"before train\(\), but FSDP2.*set eval_on_start=True"):
        check_evaluated(True, model)


def test_several_devices_in_one_process_are_refused(model_path, tmp_path, monkeypatch):
    monkeypatch.setattr(A3POConfig, "n_gpu", 2)
    with pytest.raises(ValueError, match=r"A3POTrainer does not support `nn.DataParallel`"):
        build(model_path, tmp_path)


def test_a_rollout_func_given_by_place_is_refused_too(model_path, tmp_path):
    args = A3POConfig(str(tmp_path), use_cpu=True, report_to="none")
    places = [tiny_prompts(), None, None, None, None, (None, None), None, None, None, print]
    with pytest.raises(ValueError, match="plays one episode"):
        A3POTrainer(model_path, lambda **kwargs: [], args, *places)


def test_a_prompt_that_cannot_be_evaluated_is_named(model_path, tmp_path):
    evaluation = prompts("w1", "w7 " * 128).with_transform(lambda batch: batch)  # read only when it is evaluated
    trainer = build(
        model_path,
        tmp_path,
        eval_dataset=evaluation,
        eval_strategy="steps",
        eval_steps=1,
        per_device_eval_batch_size=4,
    )
    with pytest.raises(ValueError, match="A prompt of 128 tokens leaves no room"):
        trainer.train()
