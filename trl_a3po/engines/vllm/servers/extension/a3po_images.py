"""An extension of a vLLM server: the prompts of a trainer have images, in the arrays that the trainer has made.

    PYTHONPATH=FOLDER_OF_THIS_FILE vllm serve ... --middleware a3po_images.Images

A request with images is a request for `/v1/completions` of the content type `TYPE`: its JSON, and then, as
safetensors, the fields of the images and their sizes, `(n, 2)`, width first. vLLM is shown the JSON alone, and when it
gives the prompt to its engine, the images are added.

Guarantees: vLLM computes on the token ids and on the arrays of the request, or the request ends with status 400 and
the reason; nothing is unpickled; a body is read when vLLM reads it, so after a key was asked for (`--api-key`), and up
to `MOST_BYTES`; every other request passes as it is. Written against vLLM 0.31. This file and `a3po_features.py`
import nothing of the trainer's package: copy them to other machines.
"""

import asyncio
import json
import re
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from typing import Any

PATH = "/a3po/images"
TYPE = "application/x-a3po-images"
MOST_BYTES = 1 << 30  # of a request
SIZES, FIELD = "sizes", "field."  # names of tensors: the sizes, and the beginning of those of fields
_MOST_SIDE = 1 << 16  # pixels
_NAME = re.compile(r"a3po-[0-9a-f]+-\d+")  # of a trainer's request, within all that vLLM names after it
_LENGTH = re.compile(rf"{TYPE}; json=(\d{{1,10}})")


class Images:
    """Answers `PATH` with `{"refused": reason}`: why this server takes no images, or `null` if it takes them."""

    def __init__(self, app: Any) -> None:
        self._app = app
        self._client: Any = None
        self._bodies: dict[str, bytes] = {}  # by request: its arrays, until vLLM gives the prompt to its engine
        self._features: Any = None
        self._thread = ThreadPoolExecutor(1, "a3po-images")  # one: `a3po_features.py` is for one thread

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        self._watch(scope["app"].state.engine_client)
        headers = dict(scope["headers"])
        kind = headers.get(b"content-type", b"").decode("latin-1")
        if scope["path"].endswith(PATH):
            await _answer(send, 200, {"refused": await self._in_thread(self._refusal)})
        elif not kind.startswith(TYPE):
            await self._app(scope, receive, send)
        elif isinstance(found := _request(kind, headers), str):
            await _answer(send, 400, {"error": {"message": found}})
        else:
            name, length = found
            kept = [pair for pair in scope["headers"] if pair[0] not in (b"content-type", b"content-length")]
            scope = {**scope, "headers": [*kept, (b"content-type", b"application/json")]}
            try:
                await self._app(scope, self._divided(receive, name, length), send)
            finally:
                self._bodies.pop(name, None)

    def _divided(self, receive: Any, name: str, length: int) -> Any:
        """As `receive`, of the first `length` bytes of the body. The other bytes are the arrays of request `name`."""
        read = False

        async def divided() -> Any:
            nonlocal read
            if read:
                return await receive()
            body, more = bytearray(), True
            while more:
                message = await receive()
                if message["type"] != "http.request":
                    return message
                body += message.get("body", b"")
                more = message.get("more_body", False)
                if len(body) > MOST_BYTES:  # more than its headers have said
                    return {"type": "http.disconnect"}
            read = True
            self._bodies[name] = bytes(memoryview(body)[length:])
            return {"type": "http.request", "body": bytes(memoryview(body)[:length]), "more_body": False}

        return divided

    def _watch(self, client: Any) -> None:
        """Add the images to every prompt that the engine is given for a request with images."""
        if self._client is client:
            return
        self._client, add_request = client, client.add_request

        async def add(request_id: Any, prompt: Any, *arguments: Any, **options: Any) -> Any:
            found = _NAME.search(request_id) if isinstance(request_id, str) else None
            if found is not None and found[0] in self._bodies:
                # A request has one prompt: for another one there is nothing left that could be read.
                body, self._bodies[found[0]] = self._bodies[found[0]], b""
                prompt = await self._in_thread(self._with_images, prompt, body)
            return await add_request(request_id, prompt, *arguments, **options)

        client.add_request = add

    def _in_thread(self, function: Any, *arguments: Any) -> Any:
        return asyncio.get_running_loop().run_in_executor(self._thread, function, *arguments)

    # --- in the thread ------------------------------------------------------------------------------------------

    def _refusal(self) -> str | None:
        try:
            self._started()
        except Exception as error:  # whatever vLLM's code raises for a model or a processor that it cannot use
            return f"{error}" if type(error) is RuntimeError else f"{type(error).__name__}: {error}"
        return None

    def _with_images(self, prompt: dict[str, Any], body: bytes) -> dict[str, Any]:
        """`prompt`, as vLLM has rendered its tokens, with the images of `body`."""
        from vllm.exceptions import VLLMValidationError

        try:
            images, fields = unpacked(body)
            features = self._started().of(prompt["prompt_token_ids"], images, fields)
        except Exception as error:  # whatever vLLM's code raises for arrays that it did not expect
            named = f"{error}" if type(error) is ValueError else f"{type(error).__name__}: {error}"
            raise VLLMValidationError(f"The images of a prompt cannot be used: {named}") from error
        return {
            **prompt,
            "type": "multimodal",
            "mm_kwargs": {"image": [feature.data for feature in features]},
            "mm_hashes": {"image": [feature.identifier for feature in features]},
            "mm_placeholders": {"image": [feature.mm_position for feature in features]},
        }

    def _started(self) -> Any:
        """vLLM's reading of images, for this server's model.

        Raises:
            RuntimeError: the server takes no images.
        """
        if self._features is None:
            # Beside this file, which a server imports without its package.
            code = import_module(__name__.replace("a3po_images", "a3po_features"))
            config = self._client.vllm_config
            features = code.ImageFeatures(config.model_config)
            if config.model_config.multimodal_config.mm_device_do_normalize:
                raise RuntimeError("it would normalise arrays again that the trainer's processor has normalised")
            code.check_attention(config.model_config, _backends(config.device_config.device_type))
            self._features = features
        return self._features


def unpacked(body: bytes) -> tuple[list[Any], dict[str, Any]]:
    """Stand-ins for the images of a request, which have their sizes, and the fields.

    Raises:
        ValueError: `body` does not hold them.
    """
    import numpy as np
    from safetensors import SafetensorError
    from safetensors.torch import load

    try:
        tensors = load(body)
    except SafetensorError as error:
        raise ValueError(f"the request does not hold arrays ({error}).") from error
    sizes = tensors.pop(SIZES, None)
    if sizes is None or sizes.ndim != 2 or sizes.shape[1] != 2 or str(sizes.dtype) != "torch.int64":
        raise ValueError("the request does not say how large they are.")
    pairs = sizes.tolist()
    if not pairs or not all(0 < side <= _MOST_SIDE for pair in pairs for side in pair):
        raise ValueError(f"their sizes are {str(pairs)[:100]}, and a side has from 1 to {_MOST_SIDE} pixels.")
    pixel = np.zeros(1, np.uint8)  # all of them, so that they need no memory
    images = [np.broadcast_to(pixel, (height, width, 3)) for width, height in pairs]
    return images, {name.removeprefix(FIELD): tensor for name, tensor in tensors.items()}


def _request(kind: str, headers: dict[bytes, bytes]) -> tuple[str, int] | str:
    """The name of a request with images and the length of its JSON, or why it cannot be read."""
    found = _LENGTH.fullmatch(kind)
    if found is None:
        return f"A request with images is of the content type {kind!r}, which does not say how long its JSON is."
    name = _NAME.fullmatch(headers.get(b"x-request-id", b"").decode("latin-1"))
    if name is None:
        return "A request with images has no name of a trainer's request as its X-Request-Id."
    size = headers.get(b"content-length", b"").decode("latin-1")
    if not size.isdecimal() or int(size) > MOST_BYTES:
        return f"A request with images is of {size or 'unknown'} bytes, and the most are {MOST_BYTES}."
    return name[0], int(found[1])


def _backends(device: str) -> list[Any]:
    """vLLM's attention, where it does not look by itself for one that the model can be computed with."""
    if device != "cpu":
        return []
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    return [CPUAttentionBackend]


async def _answer(send: Any, status: int, payload: Any) -> None:
    body = json.dumps(payload).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
