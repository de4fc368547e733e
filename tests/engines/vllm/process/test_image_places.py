"""Which images vLLM is given, before it computes anything: their places, their names, and what is refused."""

import json
import pickle
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from peft import LoraConfig

from tests.engines.vllm import stubbed
from tests.vision import FAMILIES, picture
from trl_a3po.engines.vllm.adapter_support import adapter_obstacle
from trl_a3po.engines.vllm.process.vllm_engine import VLLMEngine
from trl_a3po.engines.vllm.servers.extension.a3po_features import check_attention, check_places, content_of
from trl_a3po.engines.vllm.weight_names import base_weights
from trl_a3po.errors import EngineError
from trl_a3po.protocol.images import PromptImages
from trl_a3po.publish.collect import policy_spec

IMAGES = PromptImages((picture(0),), {"pixel_values": torch.arange(6.0).view(2, 3), "grid": torch.tensor([[1, 2]])})


def place(offset: int, length: int, embed: list[bool] | None = None) -> SimpleNamespace:
    return SimpleNamespace(offset=offset, length=length, is_embed=embed)


def test_every_token_of_an_image_is_in_the_place_of_one():
    check_places([5, 9, 9, 6, 9, 9], [place(1, 2), place(4, 2)], 2)
    check_places([5, 3, 9, 9, 4, 3], [place(1, 4, [False, True, True, False])], 1)  # 3 is a mark around the image
    with pytest.raises(ValueError, match="finds 1 of 2 images"):
        check_places([5, 9, 9, 6], [place(1, 2)], 2)
    with pytest.raises(ValueError, match="1 of the prompt's tokens stand for parts of an image"):
        check_places([5, 9, 9, 9], [place(1, 2)], 1)


@pytest.mark.parametrize(
    "both_ways, backend_can, refused", [(True, False, True), (True, True, False), (False, False, False)]
)
def test_attention_within_an_image_is_the_models(both_ways, backend_can, refused):
    config = SimpleNamespace(is_mm_prefix_lm=both_ways, architectures=["Gemma3"])
    backend = SimpleNamespace(supports_mm_prefix=lambda: backend_can, get_name=lambda: "CPU_ATTN")
    named = pytest.raises(RuntimeError, match=r"both directions in Gemma3.*CPU_ATTN") if refused else nullcontext()
    with named:
        check_attention(config, [backend])


def test_the_name_of_images_says_what_is_in_them():
    names = [content_of(IMAGES.fields)]
    assert content_of({name: field.clone() for name, field in IMAGES.fields.items()}) == names[0]
    pixels = IMAGES.fields["pixel_values"]
    for other in (pixels + 1, pixels.view(3, 2), pixels.double(), pixels.bfloat16()):
        names.append(content_of({**IMAGES.fields, "pixel_values": other}))
    assert len(set(names)) == len(names)


def test_vllm_is_given_the_processor_and_normalises_nothing_again():
    family = FAMILIES["gemma3"]
    engine = VLLMEngine(slots=2, python=sys.executable, processor=family.processor())
    try:
        setup = pickle.loads(engine.worker_payload(policy_spec(family.model(), torch.float32), stubbed.SAMPLING))
        saved = json.loads((Path(setup.folder) / "processor_config.json").read_text())
    finally:
        engine.close()
    assert saved["processor_class"] == "Gemma3Processor" and setup.images
    assert setup.options["mm_device_do_normalize"] is False and setup.options["mm_processor_cache_gb"] == 0
    assert setup.options["skip_tokenizer_init"] is False


def test_a_version_of_vllm_without_images_is_named(tmp_path, monkeypatch):
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "__init__.py").write_text("__version__ = '0.30.2'")
    monkeypatch.syspath_prepend(tmp_path)
    engine = VLLMEngine(slots=1, python=sys.executable, processor=FAMILIES["gemma3"].processor())
    update = stubbed.update(False, 0, complete=True)
    with pytest.raises(EngineError, match=r"vLLM 0\.31 .*with images.* this one is 0\.30\.2.* engine='transformers'"):
        engine.start(policy_spec(stubbed.policy(lora=False), torch.float32), stubbed.SAMPLING, update)
    engine.close()


def test_adapters_of_the_vision_tower_are_not_vllms():
    lora = LoraConfig(target_modules="all-linear")
    prefix, end = "base_model.model.model.", "q_proj.lora_A.default.weight"
    assert adapter_obstacle(lora, {f"{prefix}language_model.layers.0.self_attn.{end}"}) is None
    for tower in ("visual.blocks.0.attn", "vision_tower.encoder.layers.0.self_attn", "connector.modality_projection"):
        assert "language part alone" in (adapter_obstacle(lora, {f"{prefix}{tower}.{end}"}) or "")


def test_weights_of_a_tower_have_the_names_of_a_checkpoint():
    weights = {
        "base_model.model.model.vision_tower.encoder.layers.0.q_proj.base_layer.weight": 1,
        "model.vision_tower.vision_model.embeddings.weight": 2,  # of a model that has the level itself
        "model.language_model.norm.weight": 3,
        "base_model.model.model.language_model.q_proj.lora_A.default.weight": 4,
    }
    assert dict(base_weights(weights, {}, nested_tower=True)) == {
        "model.vision_tower.vision_model.encoder.layers.0.q_proj.weight": 1,
        "model.vision_tower.vision_model.embeddings.weight": 2,
        "model.language_model.norm.weight": 3,
    }
    assert "model.vision_tower.encoder.layers.0.q_proj.weight" in dict(base_weights(weights, {}))
