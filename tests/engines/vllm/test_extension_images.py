"""The extension of a server that adds images to prompts, in front of an application and an engine that note what they
are given."""

import asyncio
import json
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save

from tests.engines.vllm.stubbed import stub_vllm_on_path
from tests.vision import picture
from trl_a3po.engines.vllm.servers.extension import a3po_features, a3po_images
from trl_a3po.engines.vllm.servers.extension.a3po_images import TYPE, Images, unpacked
from trl_a3po.engines.vllm.servers.image_bodies import with_images
from trl_a3po.protocol.images import PromptImages

NAME = "a3po-0af3-7"
IMAGES = PromptImages(
    (picture(0, 20, 16),),
    {"pixel_values": torch.arange(6.0).view(2, 3).bfloat16(), "mask": torch.tensor([True]), "grid": torch.tensor([5])},
)
KIND, PARTS = with_images({"prompt": [5, 9]}, IMAGES)
BODY = b"".join(PARTS)


class Features:
    """Of vLLM: one feature for each image."""

    def __init__(self, config):
        if config.refuses:
            raise RuntimeError(config.refuses)

    def of(self, token_ids, images, fields):
        if len(token_ids) < 2:
            raise ValueError("vLLM finds 0 of 1 images.")
        return [SimpleNamespace(data=fields, identifier=f"{image.shape}", mm_position=1) for image in images]


class Client:
    def __init__(self, *, normalises=False, refuses=None):
        config = SimpleNamespace(mm_device_do_normalize=normalises)
        model = SimpleNamespace(multimodal_config=config, is_mm_prefix_lm=False, refuses=refuses)
        self.vllm_config = SimpleNamespace(model_config=model, device_config=SimpleNamespace(device_type="cuda"))
        self.given = []

    async def add_request(self, request_id, prompt, params, **options):
        self.given.append(prompt)


class App:
    """Reads the body of a request, and gives the engine its prompts."""

    def __init__(self, *, prompts=1, lets_in=True):
        self.prompts, self.lets_in, self.seen = prompts, lets_in, []

    async def __call__(self, scope, receive, send):
        self.seen.append((scope, receive))
        if not self.lets_in:
            return
        body = await receive()
        for number in range(self.prompts):
            tokens = json.loads(body["body"])["prompt"]
            prompt = {"type": "token", "prompt_token_ids": tokens, "cache_salt": "s"}
            await scope["app"].state.engine_client.add_request(f"cmpl-{NAME}-{number}", prompt, None)


@pytest.fixture(autouse=True)
def features(monkeypatch):
    monkeypatch.setattr(a3po_features, "ImageFeatures", Features)
    with stub_vllm_on_path():
        yield


def asked(extension, client, *, kind=KIND, name=NAME, length=None, body=BODY, path="/v1/completions", chunk=1000):
    """What one request was answered by the extension itself, and how much of its body was read."""
    pieces = [body[begin : begin + chunk] for begin in range(0, len(body), chunk)]
    sent, read = [], []

    async def receive():
        read.append(pieces[len(read)])
        return {"type": "http.request", "body": read[-1], "more_body": len(read) < len(pieces)}

    async def send(message):
        sent.append(message)

    headers = {"content-type": kind, "x-request-id": name, "content-length": length or str(len(body)), "other": "1"}
    scope = {
        "type": "http",
        "path": path,
        "headers": [(key.encode(), value.encode()) for key, value in headers.items() if value],
        "app": SimpleNamespace(state=SimpleNamespace(engine_client=client)),
    }
    asyncio.run(extension(scope, receive, send))
    return sent, len(read)


def test_the_engine_is_given_the_tokens_with_the_arrays_and_the_application_the_json():
    app, client = App(), Client()
    sent, _ = asked(Images(app), client)
    ((scope, _),) = app.seen
    headers = dict(scope["headers"])
    assert headers[b"content-type"] == b"application/json" and b"content-length" not in headers and headers[b"other"]
    (prompt,) = client.given
    assert not sent and prompt["type"] == "multimodal"
    assert (prompt["prompt_token_ids"], prompt["cache_salt"]) == ([5, 9], "s")
    assert (prompt["mm_hashes"], prompt["mm_placeholders"]) == ({"image": ["(16, 20, 3)"]}, {"image": [1]})
    (fields,) = prompt["mm_kwargs"]["image"]
    assert fields.keys() == IMAGES.fields.keys()
    for name, field in IMAGES.fields.items():
        assert fields[name].dtype == field.dtype and torch.equal(fields[name], field)


def test_another_request_passes_as_it_is():
    app, client = App(), Client()
    extension = Images(app)
    asked(extension, client, kind="application/json", body=b'{"prompt": [5, 9]}')
    ((scope, receive),) = app.seen
    assert dict(scope["headers"])[b"content-length"] == b"18" and receive.__qualname__.startswith("asked")
    assert client.given == [{"type": "token", "prompt_token_ids": [5, 9], "cache_salt": "s"}]


def test_nothing_is_read_of_a_request_that_the_application_does_not_let_in():
    client = Client()
    assert asked(Images(App(lets_in=False)), client) == ([], 0)


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"kind": f"{TYPE}; json=many"}, "does not say how long its JSON is"),
        ({"name": "mine"}, "no name of a trainer's request"),
        ({"name": ""}, "no name of a trainer's request"),
        ({"length": str(1 << 31)}, "the most are 1073741824"),
        ({"length": "-1"}, "of -1 bytes"),
    ],
)
def test_a_request_that_cannot_be_read_is_refused_before_it_is(changes, words):
    app = App()
    (start, answer), read = asked(Images(app), Client(), **changes)
    assert start["status"] == 400 and words in answer["body"].decode()
    assert not app.seen and read == 0


def test_a_body_that_does_not_end_is_not_kept(monkeypatch):
    monkeypatch.setattr(a3po_images, "MOST_BYTES", 3000)

    async def endless():
        return {"type": "http.request", "body": bytes(1000), "more_body": True}

    assert asyncio.run(Images(App())._divided(endless, NAME, 5)()) == {"type": "http.disconnect"}


@pytest.mark.parametrize(
    "app, body, words",
    [
        (App(prompts=2), BODY, "does not hold arrays"),  # the second has no images of its own
        (App(), PARTS[0] + b"nothing", "does not hold arrays"),
        (App(), PARTS[0].replace(b"5, 9", b"5   ") + PARTS[1], "vLLM finds 0 of 1 images"),
        (App(), PARTS[0] + save({"field.pixel_values": torch.ones(1)}), "does not say how large"),
        (App(), PARTS[0] + save({"sizes": torch.tensor([[1 << 20, 5]])}), "a side has from 1 to 65536 pixels"),
        (App(), PARTS[0] + save({"sizes": torch.zeros(0, 2, dtype=torch.long)}), "a side has from 1 to 65536 pixels"),
    ],
)
def test_images_that_cannot_be_used_are_refused_with_the_reason(app, body, words):
    from vllm.exceptions import VLLMValidationError

    with pytest.raises(VLLMValidationError, match=words):
        asked(Images(app), Client(), body=body)


@pytest.mark.parametrize(
    "client, refused",
    [
        (Client(), None),
        (Client(normalises=True), "it would normalise arrays again that the trainer's processor has normalised"),
        (Client(refuses="vLLM has no code of its own"), "vLLM has no code of its own"),
    ],
)
def test_the_extension_says_whether_the_server_takes_images(client, refused):
    (_, answer), _ = asked(Images(App()), client, path="/a3po/images", kind="")
    assert json.loads(answer["body"]) == {"refused": refused}


def test_stand_ins_for_images_need_no_memory():
    images, _ = unpacked(save({"sizes": torch.tensor([[65536, 65536]])}))
    assert images[0].shape == (65536, 65536, 3) and images[0].base is not None
