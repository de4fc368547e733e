"""Tiny vision-language models of every family, with their processors and pictures, built from nothing."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from PIL import Image
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Gemma3Processor,
    Idefics3Config,
    Idefics3ForConditionalGeneration,
    Idefics3Processor,
    LlavaNextConfig,
    LlavaNextForConditionalGeneration,
    LlavaNextProcessor,
    PreTrainedTokenizerFast,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2_5_VLProcessor,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    Qwen3VLProcessor,
    SmolVLMConfig,
    SmolVLMForConditionalGeneration,
)
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from transformers.models.llava_next.image_processing_pil_llava_next import LlavaNextImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from tests.tiny import WORDS

SPECIAL = [
    "<pad>",
    "<eos>",
    "<unk>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
    "<image>",
    "<boi>",
    "<eoi>",
    "<fake_token_around_image>",
    "<global-img>",
    "<end_of_utterance>",
    "user",
    "assistant",
    *[f"<row_{row}_col_{column}>" for row in (1, 2) for column in (1, 2)],
]
VOCAB = len(SPECIAL) + len(WORDS)
PLACEHOLDERS = {"qwen": "<|vision_start|><|image_pad|><|vision_end|>", "gemma3": "<boi>"}

TEXT = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "bos_token_id": None,
    "eos_token_id": 1,
    "pad_token_id": 0,
    "initializer_range": 0.3,
}
TOWER = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "patch_size": 4}
MROPE = {"rope_type": "default", "rope_theta": 10000.0}


class _ImagesOnly:
    """A processor without one of videos, which needs torchvision."""

    def __init__(self, image_processor: Any, tokenizer: Any, chat_template: str | None = None):
        super().__init__(image_processor, tokenizer, None, chat_template=chat_template)  # type: ignore[call-arg]


class Qwen25Processor(_ImagesOnly, Qwen2_5_VLProcessor):
    pass


class Qwen3Processor(_ImagesOnly, Qwen3VLProcessor):
    pass


@dataclass(frozen=True)
class Family:
    """What builds a tiny model and its processor."""

    model_class: type
    config: Callable[[], Any]
    processor: Callable[[], Any]

    def model(self, seed: int = 0) -> torch.nn.Module:
        torch.manual_seed(seed)
        config = self.config()
        config._attn_implementation = "sdpa"
        model = self.model_class(config).to(torch.float32).eval()
        with torch.no_grad():  # so that pictures matter, whatever the family scales its features by
            for name, parameter in model.named_parameters():
                if "visual" in name or "vision" in name or "connector" in name or "projector" in name:
                    parameter.add_(0.2 * torch.randn_like(parameter))
        return model


def tokenizer() -> PreTrainedTokenizerFast:
    words = Tokenizer(models.WordLevel({t: i for i, t in enumerate([*SPECIAL, *WORDS])}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.add_special_tokens([token for token in SPECIAL if token.startswith("<")])
    return PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>", padding_side="left"
    )


def chat_template(placeholder: str) -> str:
    return (
        "{% for m in messages %}{{ m['role'] }} {% if m['content'] is string %}{{ m['content'] }} {% else %}"
        "{% for part in m['content'] %}{% if part['type'] == 'image' %}"
        + placeholder
        + "{% else %}{{ part['text'] }}{% endif %} {% endfor %}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}assistant {% endif %}"
    )


def _qwen_images() -> Any:
    size = {"shortest_edge": 8 * 8, "longest_edge": 24 * 24}
    return Qwen2VLImageProcessorPil(patch_size=4, merge_size=2, temporal_patch_size=1, size=size)


def _qwen_processor(kind: type) -> Any:
    return kind(_qwen_images(), tokenizer(), chat_template=chat_template(PLACEHOLDERS["qwen"]))


def _gemma_processor() -> Any:
    words = tokenizer()
    words.boi_token, words.eoi_token, words.image_token = "<boi>", "<eoi>", "<image>"
    words.boi_token_id, words.image_token_id = (words.convert_tokens_to_ids(t) for t in ("<boi>", "<image>"))
    images = Gemma3ImageProcessorPil(size={"height": 16, "width": 16})
    return Gemma3Processor(images, words, chat_template=chat_template("<boi>"), image_seq_length=4)


def _idefics_processor() -> Any:
    images = Idefics3ImageProcessorPil(size={"longest_edge": 32}, max_image_size={"longest_edge": 16})
    return Idefics3Processor(images, tokenizer(), image_seq_len=4, chat_template=chat_template("<image>"))


def _llava_processor() -> Any:
    images = LlavaNextImageProcessorPil(
        size={"shortest_edge": 16},
        crop_size={"height": 16, "width": 16},
        image_grid_pinpoints=[[16, 32], [32, 16], [32, 32]],
    )
    return LlavaNextProcessor(
        images,
        tokenizer(),
        patch_size=4,
        vision_feature_select_strategy="default",
        chat_template=chat_template("<image>"),
        image_token="<image>",
        num_additional_image_tokens=1,
    )


def _qwen25_config() -> Qwen2_5_VLConfig:
    return Qwen2_5_VLConfig(
        text_config={**TEXT, "rope_parameters": {**MROPE, "mrope_section": [1, 1, 2]}},
        vision_config={
            "hidden_size": 32,
            "intermediate_size": 48,
            "depth": 2,
            "num_heads": 4,
            "out_hidden_size": 32,
            "patch_size": 4,
            "spatial_merge_size": 2,
            "temporal_patch_size": 1,
            "window_size": 16,
            "fullatt_block_indexes": [1],
        },
        **_qwen_ids(),
    )


def _qwen3_config() -> Qwen3VLConfig:
    return Qwen3VLConfig(
        text_config={**TEXT, "rope_parameters": {**MROPE, "mrope_section": [2, 1, 1]}},
        vision_config={
            "hidden_size": 32,
            "intermediate_size": 48,
            "depth": 3,
            "num_heads": 4,
            "out_hidden_size": 32,
            "patch_size": 4,
            "spatial_merge_size": 2,
            "temporal_patch_size": 1,
            "num_position_embeddings": 16,
            "deepstack_visual_indexes": [0, 1],
        },
        **_qwen_ids(),
    )


def _qwen_ids() -> dict[str, int]:
    ids = {"image_token_id": "<|image_pad|>", "video_token_id": "<|video_pad|>"}
    ids |= {"vision_start_token_id": "<|vision_start|>", "vision_end_token_id": "<|vision_end|>"}
    return {name: SPECIAL.index(token) for name, token in ids.items()}


def _gemma_config() -> Gemma3Config:
    layers = ["sliding_attention", "sliding_attention", "full_attention"]
    return Gemma3Config(
        text_config={**TEXT, "sliding_window": 12, "layer_types": layers, "query_pre_attn_scalar": 8},
        vision_config={**TOWER, "image_size": 16, "model_type": "siglip_vision_model"},
        mm_tokens_per_image=4,
        image_token_index=SPECIAL.index("<image>"),
        boi_token_index=SPECIAL.index("<boi>"),
        eoi_token_index=SPECIAL.index("<eoi>"),
    )


def _idefics_config(kind: type) -> Any:
    return kind(
        text_config={**TEXT, "model_type": "llama"},
        vision_config={**TOWER, "image_size": 16},
        image_token_id=SPECIAL.index("<image>"),
        scale_factor=2,
        pad_token_id=0,
    )


def _llava_config() -> LlavaNextConfig:
    return LlavaNextConfig(
        text_config={**TEXT, "model_type": "mistral", "sliding_window": None},
        vision_config={**TOWER, "image_size": 16, "projection_dim": 32, "model_type": "clip_vision_model"},
        image_token_index=SPECIAL.index("<image>"),
        image_grid_pinpoints=[[16, 32], [32, 16], [32, 32]],
        vision_feature_layer=-1,
    )


FAMILIES = {
    "qwen2_5_vl": Family(Qwen2_5_VLForConditionalGeneration, _qwen25_config, lambda: _qwen_processor(Qwen25Processor)),
    "qwen3_vl": Family(Qwen3VLForConditionalGeneration, _qwen3_config, lambda: _qwen_processor(Qwen3Processor)),
    "gemma3": Family(Gemma3ForConditionalGeneration, _gemma_config, _gemma_processor),
    "idefics3": Family(Idefics3ForConditionalGeneration, lambda: _idefics_config(Idefics3Config), _idefics_processor),
    "smolvlm": Family(SmolVLMForConditionalGeneration, lambda: _idefics_config(SmolVLMConfig), _idefics_processor),
    "llava_next": Family(LlavaNextForConditionalGeneration, _llava_config, _llava_processor),
}


def picture(number: int, width: int = 20, height: int = 16) -> Image.Image:
    """Noise that depends on `number`."""
    pixels = np.random.default_rng(number).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def messages(text: str, *pictures: Image.Image) -> list[dict[str, Any]]:
    """A user's message with these pictures before its text."""
    parts = [{"type": "image", "image": image} for image in pictures]
    return [{"role": "user", "content": [*parts, {"type": "text", "text": text}]}]
