"""Tiny vision-language policies that a real vLLM can run, prompts with pictures, and the log-probs they must have."""

import dataclasses
import json
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from transformers import ProcessorMixin, Qwen2_5_VLProcessor, Qwen3VLProcessor

from tests.vision import FAMILIES, messages
from trl_a3po.protocol.engine import GroupFinished, GroupRequest, SamplingSettings
from trl_a3po.protocol.images import PromptImages

TOLERANCE = 1e-4
_IMAGE_TOKENS = ["<image>", "<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<boi>"]


class WholeProcessor:
    """Saves a processor as users have it: one of videos belongs to Qwen's, which the tests' processors leave out."""

    def __init__(self, processor):
        self.processor = processor

    def save_pretrained(self, folder, **options) -> None:
        ProcessorMixin.save_pretrained(self.processor, folder, **options)
        file = Path(folder) / "processor_config.json"
        saved = json.loads(file.read_text())
        if isinstance(self.processor, Qwen2_5_VLProcessor | Qwen3VLProcessor):
            version = "2_5_" if isinstance(self.processor, Qwen2_5_VLProcessor) else "3"
            video = {name: value for name, value in saved["image_processor"].items() if name != "image_processor_type"}
            saved["processor_class"] = f"Qwen{version}VLProcessor"
            saved["video_processor"] = {**video, "video_processor_type": f"Qwen{version[0]}VLVideoProcessor"}
            file.write_text(json.dumps(saved))


def policy(name: str, adapter: bool):
    """A policy that vLLM's attention on a CPU can run, and its processor."""
    family = FAMILIES[name]

    def config():
        built = family.config()
        text = built.get_text_config()
        text.hidden_size, text.head_dim, text.max_position_embeddings = 128, 32, 1024
        text.initializer_range = 0.1
        rope = getattr(text, "rope_parameters", None) or {}
        if "mrope_section" in rope:
            rope["mrope_section"] = [4 * part for part in rope["mrope_section"]]
            rope["mrope_interleaved"] = name == "qwen3_vl"  # as in checkpoints
        if name.startswith("qwen"):
            built.vision_config.out_hidden_size = 128
        return built

    model, processor = dataclasses.replace(family, config=config).model(), family.processor()
    if name == "gemma3":  # vLLM reads this processor anew, and looks for tokens that every checkpoint has
        names = {"boi_token": "<boi>", "eoi_token": "<eoi>", "image_token": "<image>"}
        backend = processor.tokenizer.backend_tokenizer
        processor.tokenizer = type(processor.tokenizer)(
            tokenizer_object=backend, pad_token="<pad>", eos_token="<eos>", model_specific_special_tokens=names
        )
        processor.tokenizer.add_tokens(["\n" * count for count in range(1, 5)])
        model.resize_token_embeddings(len(processor.tokenizer))
    if adapter:
        layers = r".*(language_model|text_model).*_proj"
        model = get_peft_model(model, LoraConfig(r=8, target_modules=layers, init_lora_weights=False)).eval()
    return model, processor


def request(processor, number: int, *pictures) -> GroupRequest:
    fields = processor.apply_chat_template(
        [messages("w1 w2", *pictures)],
        add_generation_prompt=True,
        tokenize=True,
        return_dict=True,
        processor_kwargs={"return_tensors": "pt"},
    )
    ids = tuple(fields.pop("input_ids")[0].tolist())
    del fields["attention_mask"]
    return GroupRequest(number, number, ids, 2, images=PromptImages(pictures, dict(fields)) if pictures else None)


@torch.no_grad()
def clean_logps(model, asked: GroupRequest, rollout, temperature: float) -> torch.Tensor:
    ids = torch.tensor([[*asked.prompt_ids, *rollout.token_ids]])
    fields = {} if asked.images is None else asked.images.over(ids.shape[1], torch.device("cpu"))
    logits = model(input_ids=ids, **fields).logits[0, len(asked.prompt_ids) - 1 : -1].float()
    return (logits / temperature).log_softmax(-1).gather(1, torch.tensor(rollout.token_ids)[:, None])[:, 0]


def sampling_of(processor, temperature: float, length: int) -> SamplingSettings:
    suppressed = tuple(processor.tokenizer.convert_tokens_to_ids(_IMAGE_TOKENS))
    return SamplingSettings(length, temperature=temperature, suppress_token_ids=suppressed, seed=5)


def weights_of(model) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def check_stamps(model, states, requests, events, *, kv_on_publish: str, temperature: float) -> set[tuple]:
    """Every token's log-prob is that of a clean forward under the weights of its version, of the two in `states`; with
    caches that are kept, as long as the version is the first. Returns the versions that rollouts have, behind whether
    they have images."""
    spans = set()
    for asked in requests:
        event = events[asked.request_id]
        assert isinstance(event, GroupFinished), event
        for rollout in event.rollouts:
            versions = torch.tensor(rollout.versions)
            spans.add((asked.images is not None, *sorted(set(rollout.versions))))
            clean = []
            for state in states:
                model.load_state_dict(state)
                clean.append(clean_logps(model, asked, rollout, temperature))
            stamped = torch.stack(clean).gather(0, versions[None])[0]
            exact = versions == versions[0] if kv_on_publish == "keep" else versions >= 0
            torch.testing.assert_close(torch.tensor(rollout.logps)[exact], stamped[exact], rtol=0, atol=TOLERANCE)
            assert (clean[0] - clean[1]).abs().median() > 50 * TOLERANCE  # or another version would be as good
    return spans
