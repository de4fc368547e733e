"""Which models can be sampled from: against clean forwards, or refused by name."""

import pytest
import torch
from peft import PromptTuningConfig, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM

from tests.engines.transformers.tiny_models import (
    MIXED_WINDOW,
    MIXTURES,
    MODELS,
    MOE,
    gap,
    prompts,
    request,
    run,
    settings,
    tiny_model,
)
from tests.tiny import SHAPE
from trl_a3po.engines.transformers.architecture import _ALL_LAYERS_SLIDE, _MASK_BY_LAYER_TYPE
from trl_a3po.engines.transformers.decoder import SlotDecoder

pytestmark = pytest.mark.long

ARCHITECTURES = [(name, False) for name in MODELS | MIXTURES] + [(name, True) for name in MODELS]


@pytest.mark.parametrize(("name", "deterministic"), ARCHITECTURES)
def test_log_probs_agree_with_a_clean_forward(name, deterministic):
    model = tiny_model(name)
    decoder = SlotDecoder(model, settings(20), slots=4, deterministic=deterministic, max_prompt_tokens=12)
    texts = prompts(5)
    results = run(decoder, [request(i, text, 3) for i, text in enumerate(texts)])
    for i, text in enumerate(texts):
        for rollout in results[i]:
            assert gap(model, text, rollout).max() < 1e-4
            assert rollout.finish_reason == "length" and len(rollout.token_ids) == 20


def test_every_architecture_allowed_to_slide_is_tested():
    tested = {model_type for name, (model_type, _) in (MODELS | MIXTURES).items() if name.endswith("-sliding")}
    assert tested == _ALL_LAYERS_SLIDE | _MASK_BY_LAYER_TYPE


def test_the_window_matters():
    """A clean forward without the window disagrees: the sliding models of this file do slide."""
    model, text = tiny_model("mistral-sliding"), prompts(1)[0]
    [rollout] = run(SlotDecoder(model, settings(20), slots=1), [request(0, text)])[0]
    everything = tiny_model("mistral-sliding", sliding_window=None)
    assert gap(everything, text, rollout).max() > 1e-2


def build(model_type: str, attention: str = "eager", auto=AutoModelForCausalLM, **extra) -> torch.nn.Module:
    return auto.from_config(
        AutoConfig.for_model(
            model_type, **{key: value for key, value in {**SHAPE, **extra}.items() if value is not None}
        ),
        attn_implementation=attention,
    )


REFUSED = {
    "t5": (lambda: build("t5", auto=AutoModelForSeq2SeqLM), "'t5' models.*encoder-decoder"),
    "mamba": (lambda: build("mamba"), "'mamba' models.*linear_attention"),
    "linear attention": (lambda: build("qwen3_next", "sdpa", **MOE), "'qwen3_next' models.*linear_attention"),
    "chunked attention": (lambda: build("llama4_text", "sdpa", **MOE), "'llama4_text' models.*chunked_attention"),
    "bloom": (lambda: build("bloom", n_head=4, n_layer=2), "'bloom' models.*forward without .'position_ids'."),
    "alibi": (
        lambda: build("falcon", head_dim=None, alibi=True),
        "'falcon' models.*positions from its attention mask",
    ),
    "untested window": (lambda: build("granite_swa", **MIXED_WINDOW), "'granite_swa' models.*not been tested"),
    "positions of the batch": (
        lambda: build("llama", rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}),
        "'llama' models.*rope_type='dynamic'",
    ),
    "flex attention": (lambda: build("llama", "flex_attention"), "attn_implementation='flex_attention'.*'sdpa'"),
    "prompt tuning": (
        lambda: get_peft_model(
            tiny_model(), PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3, prompt_tuning_init="RANDOM")
        ),
        "PROMPT_TUNING.*use LoRA",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_this_engine_cannot_do_is_refused_by_name(name):
    make, message = REFUSED[name]
    with pytest.raises(ValueError, match=message):
        SlotDecoder(make(), settings(), slots=2)


def test_a_mixture_of_experts_cannot_be_deterministic():
    with pytest.raises(ValueError, match="deterministic=True cannot hold for 'mixtral'"):
        SlotDecoder(tiny_model("mixtral-sliding"), settings(), slots=2, deterministic=True, max_prompt_tokens=4)
