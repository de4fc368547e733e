"""Images on stub servers: what a request carries, what a publish discards, and who is refused."""

import shlex
from dataclasses import replace

import pytest
import torch

from tests.engines.vllm.stub_server import StubServer
from tests.engines.vllm.stubbed import finished, requests, started, until, update
from tests.vision import FAMILIES, picture
from trl_a3po import A3POConfig
from trl_a3po.engines.vllm.servers import image_bodies
from trl_a3po.engines.vllm.servers.checkpoint_folder import CheckpointFolder
from trl_a3po.engines.vllm.servers.vllm_servers import VLLMServers
from trl_a3po.errors import EngineError
from trl_a3po.protocol.engine import GroupFailed
from trl_a3po.protocol.images import PromptImages
from trl_a3po.publish.collect import collect_weights, policy_spec
from trl_a3po.session.build_engine import build_engine

FIELDS = {
    "pixel_values": torch.arange(48.0).view(3, 4, 4)[:, ::2],  # which is not contiguous
    "image_grid_thw": torch.tensor([[1, 2, 2], [1, 1, 1]]),
    "pixel_attention_mask": torch.tensor([[True, False]]),
}
IMAGES = PromptImages((picture(0, 20, 16), picture(1, 12, 12)), FIELDS)
RESETS = ["/reset_encoder_cache", "/reset_mm_cache"]


def test_a_request_carries_the_trainers_arrays_and_one_without_images_is_what_it_was(tmp_path):
    server = StubServer()
    engine = started([server], tmp_path, images=True)
    try:
        text, shown = requests(2)
        for asked in (text, replace(shown, images=IMAGES)):
            engine.submit([asked])
            finished(engine, 1)
        without, (sizes, fields) = server.images
        assert without is None and [size.shape for size in sizes] == [(16, 20, 3), (12, 12, 3)]
        assert fields.keys() == FIELDS.keys() and all(torch.equal(fields[name], FIELDS[name]) for name in FIELDS)
        same = {**server.bodies[0], "prompt": None}
        assert {**server.bodies[1], "prompt": None} == same
        assert server.bodies[1]["prompt"] == list(shown.prompt_ids)
    finally:
        engine.close()


@pytest.mark.parametrize("lora", [False, True], ids=["whole", "adapter"])
@pytest.mark.parametrize("kv_on_publish", ["keep", "recompute"])
def test_every_publish_discards_what_a_server_made_of_images(tmp_path, lora, kv_on_publish):
    server = StubServer(lora=lora)
    engine = started([server], tmp_path, kv_on_publish=kv_on_publish, images=True)
    load = "/v1/load_lora_adapter" if lora else "/collective_rpc"
    try:
        for version in (1, 2):
            server.calls.clear()
            engine.publish(update(lora, version))
            loaded = server.calls.index(load)
            assert server.calls[loaded + 1 : loaded + 3] == RESETS  # before it goes on, where it has paused
            assert server.calls.count(load) == 1 and "/resume" not in server.calls[:loaded]
    finally:
        engine.close()


def test_a_run_without_images_discards_nothing(tmp_path):
    server = StubServer()
    engine = started([server], tmp_path)
    engine.publish(update(False, 1))
    engine.close()
    assert not set(RESETS) & set(server.calls)


@pytest.mark.parametrize("lora", [False, True], ids=["whole", "adapter"])
def test_a_server_that_comes_back_discards_what_it_made_of_images(tmp_path, lora):
    servers = [StubServer(lora=lora) for _ in range(2)]
    engine = started(servers, tmp_path, images=True)
    try:
        servers[0].kill()
        until(lambda: engine.stats().extra["servers_live"] == 1)
        back = servers[0].restarted()
        until(lambda: engine.stats().extra["servers_live"] == 2)
        assert [call for call in back.calls if call in RESETS] == RESETS
    finally:
        engine.close()


def test_rollouts_that_go_on_under_new_weights_show_their_images_again(tmp_path):
    server = StubServer(step=0.02)
    engine = started([server], tmp_path, kv_on_publish="recompute", images=True)
    try:
        asked = replace(requests(1, rollouts=1)[0], images=IMAGES)
        engine.submit([asked])
        until(lambda: server.tokens > 3)
        engine.publish(update(False, 1))
        finished(engine, 1)
        assert len(server.images) == 2
        first, second = (fields for _, fields in server.images)
        assert all(torch.equal(first[name], second[name]) for name in FIELDS)
        assert server.bodies[1]["prompt"][: len(asked.prompt_ids)] == list(asked.prompt_ids)
    finally:
        engine.close()


def test_images_that_the_server_cannot_use_end_their_request_with_its_reason(tmp_path):
    server = StubServer(cannot_use_images="vLLM finds 1 of 2 images in the prompt's tokens")
    assert "vLLM finds 1 of 2 images in the prompt's tokens" in failure(tmp_path, server)
    assert [images is None for images in server.images] == [False, True]  # it is not asked again


def test_images_that_are_too_large_to_send_are_not_sent(tmp_path, monkeypatch):
    monkeypatch.setattr(image_bodies, "MOST_BYTES", (1 << 24) + 100)
    server = StubServer()
    assert "show fewer or smaller images" in failure(tmp_path, server)
    assert server.images == [None]


def failure(tmp_path, server) -> str:
    """Why a request with images fails, beside one without that does not."""
    engine = started([server], tmp_path, images=True)
    try:
        engine.submit([replace(requests(1)[0], images=IMAGES)])
        events = []
        until(lambda: events.extend(engine.wait(0.1)) or events)
        engine.submit(requests(1, first=1))
        finished(engine, 1)
    finally:
        engine.close()
    (event,) = events
    assert isinstance(event, GroupFailed)
    return event.reason


@pytest.mark.parametrize(
    ("lacks", "words"),
    [
        ({"images": False}, "its prompts cannot have images: it lacks the extension a3po_images.py"),
        ({"refuses_images": "No module named 'torchvision'"}, "cannot have images: No module named 'torchvision'"),
        ({"version": "0.30.2"}, "it is vLLM 0.30.2, and prompts with images need 0.31"),
    ],
)
@pytest.mark.parametrize("lora", [False, True], ids=["whole", "adapter"])
def test_a_server_that_takes_no_images_is_refused_for_prompts_with_images_alone(tmp_path, lora, lacks, words):
    server = StubServer(lora=lora, **lacks)
    with pytest.raises(EngineError, match=words) as error:
        started([server], tmp_path, images=True)
    (command,) = [line for line in str(error.value).splitlines() if "vllm serve" in line]
    options = shlex.split(command)
    middleware = [options[n + 1] for n, option in enumerate(options) if option == "--middleware"]
    assert middleware == ["a3po_server.TokenCounts"] * (not lora) + ["a3po_images.Images"]
    assert {"--no-mm-device-do-normalize", "--mm-processor-cache-gb"} <= set(options)
    assert any(option.startswith("PYTHONPATH=") for option in options)
    started([server], tmp_path).close()


def test_an_engine_for_prompts_without_images_is_given_none(tmp_path):
    with pytest.raises(ValueError, match="Request 7 has images"):
        VLLMServers(["http://localhost:1"], folder=tmp_path, kept_versions=1).submit(
            [replace(requests(1, first=7)[0], images=IMAGES)]
        )


def test_weights_of_a_model_that_sees_images_go_by_disk(tmp_path):
    settings = {"use_cpu": True, "engine": "vllm", "vllm_server_urls": ["http://localhost:1"]}
    args = A3POConfig(output_dir=str(tmp_path), **settings, vllm_weight_transfer="nccl")
    with pytest.raises(ValueError, match=r"'nccl' with a Gemma3Processor.*'disk'.*processor\.tokenizer"):
        build_engine(args, torch.device("cpu"), FAMILIES["gemma3"].processor())
    assert isinstance(build_engine(args, torch.device("cpu")), VLLMServers)


def test_a_tower_is_written_under_the_names_of_a_checkpoint(tmp_path):
    model = FAMILIES["llava_next"].model()
    folder = CheckpointFolder(tmp_path, policy_spec(model, torch.float32))
    folder.write(collect_weights(model, 0, complete=True))
    index = (folder.folder / "model.safetensors.index.json").read_text()
    assert "vision_tower.vision_model.encoder.layers.0" in index and "vision_tower.encoder" not in index
