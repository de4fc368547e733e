"""Images on a real vLLM: what is recorded is what a clean forward gives, under the weights of the stamped version, by
the trainer's own arrays; a publish leaves nothing of what the vision tower made of an image before."""

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import ProcessorMixin, Qwen2_5_VLProcessor, Qwen3VLProcessor

from tests.engines.transformers.running import events_of, train
from tests.engines.vllm.real_vllm import vllm_python
from tests.images.pictured import pictured
from tests.runs import logged
from tests.vision import FAMILIES, messages, picture
from tests.workers.processes import until
from trl_a3po.engines.vllm.process.vllm_engine import VLLMEngine
from trl_a3po.errors import EngineError
from trl_a3po.protocol.engine import GroupFinished, GroupRequest, SamplingSettings
from trl_a3po.protocol.images import PromptImages
from trl_a3po.publish.collect import collect_weights, policy_spec

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

TEMPERATURE, TOLERANCE = 0.8, 1e-4
LENGTH = 500  # tokens; a real vLLM has sampled few hundred before a publish comes
CASES = [
    ("qwen2_5_vl", "whole", "recompute"),
    ("idefics3", "adapter", "keep"),
    *[
        pytest.param(family, what, kv, marks=pytest.mark.slow)
        for family, what, kv in [
            ("qwen2_5_vl", "adapter", "recompute"),
            ("qwen3_vl", "whole", "keep"),
            ("idefics3", "whole", "keep"),
            ("llava_next", "whole", "recompute"),
        ]
    ],
]


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
def clean_logps(model, asked: GroupRequest, rollout) -> torch.Tensor:
    ids = torch.tensor([[*asked.prompt_ids, *rollout.token_ids]])
    fields = {} if asked.images is None else asked.images.over(ids.shape[1], torch.device("cpu"))
    logits = model(input_ids=ids, **fields).logits[0, len(asked.prompt_ids) - 1 : -1].float()
    return (logits / TEMPERATURE).log_softmax(-1).gather(1, torch.tensor(rollout.token_ids)[:, None])[:, 0]


@pytest.mark.parametrize("name, what, kv_on_publish", CASES)
def test_a_publish_leaves_nothing_of_the_images_before(name, what, kv_on_publish):
    model, processor = policy(name, what == "adapter")
    image_tokens = ["<image>", "<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<boi>"]
    sampling = SamplingSettings(
        LENGTH,
        temperature=TEMPERATURE,
        suppress_token_ids=tuple(processor.tokenizer.convert_tokens_to_ids(image_tokens)),
        seed=5,
    )
    first, second, third = picture(1), picture(2, 30, 18), picture(3, 12, 28)
    requests = [request(processor, 0, first), request(processor, 1, second, third), request(processor, 2)]
    requests += [dataclasses.replace(requests[0], request_id=3), request(processor, 4, third)]
    engine = VLLMEngine(
        slots=5,
        python=vllm_python(),
        processor=WholeProcessor(processor),
        kv_on_publish=kv_on_publish,
        threads=1,
        start_timeout=300.0,
    )
    try:
        engine.start(policy_spec(model, torch.float32), sampling, collect_weights(model, 0, complete=True))
        states = [{name: tensor.clone() for name, tensor in model.state_dict().items()}]
        train(model, scale=0.05)
        states.append({name: tensor.clone() for name, tensor in model.state_dict().items()})
        trained = collect_weights(model, 1, complete=False)
        engine.submit(requests[:3])
        until(lambda: engine.stats().tokens > 20)
        engine.publish(trained)
        engine.submit(requests[3:])
        events = events_of(engine, range(5))
    finally:
        engine.close()
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
                clean.append(clean_logps(model, asked, rollout))
            stamped = torch.stack(clean).gather(0, versions[None])[0]
            exact = versions == versions[0] if kv_on_publish == "keep" else versions >= 0
            torch.testing.assert_close(torch.tensor(rollout.logps)[exact], stamped[exact], rtol=0, atol=TOLERANCE)
            assert (clean[0] - clean[1]).abs().median() > 50 * TOLERANCE  # or another version would be as good
    assert {(True, 0, 1), (True, 1)} <= spans


def test_a_run_trains_on_what_vllm_has_sampled(tmp_path):
    model, processor = policy("qwen2_5_vl", adapter=False)
    processor.save_pretrained = WholeProcessor(processor).save_pretrained
    trainer = pictured(
        "qwen2_5_vl",
        tmp_path,
        model=model,
        processing_class=processor,
        engine="vllm",
        vllm_python=vllm_python(),
        engine_slots=8,
        engine_threads=1,
        max_staleness=1,
        max_steps=4,
        kv_on_publish="recompute",
        delivery_check_steps=2,
    )
    trainer.train()
    assert trainer.state.global_step == 4
    gaps = [*logged(trainer, "a3po/delivery/gap"), *logged(trainer, "a3po/engine_gap/max")]
    assert gaps and max(gaps) < TOLERANCE


@pytest.mark.slow
def test_attention_in_both_directions_which_vllm_lacks_on_a_cpu_is_refused():
    model, processor = policy("gemma3", adapter=False)
    engine = VLLMEngine(slots=1, python=vllm_python(), processor=processor, start_timeout=300.0, threads=1)
    try:
        with pytest.raises(EngineError, match=r"both directions in Gemma3.*CPU_ATTN.*engine='transformers'"):
            engine.start(
                policy_spec(model, torch.float32), SamplingSettings(4), collect_weights(model, 0, complete=True)
            )
    finally:
        engine.close()
