"""A vLLM server in this process, for tests: the endpoints that the engine uses, and nothing that computes.

It samples arbitrary tokens, one each `step` seconds. The log-prob of a token says what it was sampled from: weights
whose first number is `w` give `logp_of(w)`. Faults of a real server can be switched on.
"""

import contextlib
import json
import socket
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

from safetensors.torch import load_file

from trl_a3po.engines.vllm.servers.extension.a3po_images import TYPE, unpacked


def logp_of(weight: float) -> float:
    return -0.01 * (1.0 + weight)


def first_number(folder: str) -> float:
    """Of the alphabetically first tensor in a checkpoint or adapter."""
    tensors = {}
    for path in sorted(Path(folder).glob("*.safetensors")):
        tensors |= load_file(path)
    if not tensors:
        raise FileNotFoundError(folder)
    return tensors[min(tensors)].flatten()[0].item()


class StubServer:
    """
    Args:
        lora: started with `--enable-lora`.
        step: seconds between two tokens.
        changes: settings it reports otherwise, by name.

    `faults` names what goes wrong with the next completions, one each: "hang", "drip", "garbage", "misaligned", "nan",
    "500", "reset".
    """

    def __init__(self, *, lora: bool = False, step: float = 0.002, port: int = 0, **changes):
        self.lora = lora
        self.step = step
        self.faults: list[str] = []
        self.served = 0
        self.calls: list[str] = []
        self.adapters: dict[str, float] = {}
        self.weight = -1.0
        self.tokens = 0
        self.bodies: list[dict] = []
        self.images: list[tuple[list, dict] | None] = []  # of each body
        self._counts: dict[
            str, list[tuple[int, int]]
        ] = {}  # of open requests: tokens of each sequence, and at its end
        self._answered: list[str] = []
        self.changes = changes
        self._state = threading.Condition()
        self._paused = False
        self._sampling = 0
        self._aborts = 0
        self._gone = threading.Event()
        self._connections: set[socket.socket] = set()
        self._http = _Listener(("127.0.0.1", port), _handler(self))
        self._http.daemon_threads = True
        self.port = self._http.server_address[1]
        threading.Thread(target=self._http.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def kill(self) -> None:
        """As by SIGKILL: nothing answers any more, and open connections break."""
        self._gone.set()
        self._http.shutdown()
        self._http.server_close()
        for connection in list(self._connections):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        with self._state:
            self._state.notify_all()

    def restarted(self) -> "StubServer":
        """Another process on the same port, with the weights it was started with."""
        return StubServer(lora=self.lora, step=self.step, port=self.port, **self.changes)

    # --- endpoints ----------------------------------------------------------------------------------------------

    def get(self, path: str) -> tuple[int, object]:
        config = {
            "model_config": {"logprobs_mode": "processed_logprobs", "model": "stub/base"},
            "device_config": {"device": self.changes.get("device", "cuda")},
            "scheduler_config": {"max_num_seqs": 8},
            "lora_config": {"max_lora_rank": 16, "max_loras": 8} if self.lora else None,
            "weight_transfer_config": {"backend": self.changes["backend"]} if "backend" in self.changes else None,
        }
        environment = {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": True}
        environment["VLLM_BATCH_INVARIANT"] = False
        for name, value in self.changes.items():
            for section in (*(s for s in config.values() if s), environment):
                if name in section:
                    section[name] = value
        models = [{"id": "base", "parent": None, "max_model_len": self.changes.get("max_model_len", 64)}]
        models += [{"id": name, "parent": "base", "max_model_len": 64} for name in self.adapters]
        answers = {
            "/health": "",
            "/version": {"version": self.changes.get("version", "0.31.0")},
            "/v1/models": {"data": models},
            "/server_info": {"vllm_config": config, "vllm_env": environment},
            "/metrics": f'vllm:generation_tokens_total{{engine="0"}} {float(self.tokens)}\n',
        }
        if path == "/a3po/token_counts" and self.changes.get("counts_tokens") is not False:
            with self._state:
                begun = {
                    name: {"begun": True, "tokens": {i: n for i, (n, most) in enumerate(counts) if n < most}}
                    for name, counts in self._counts.items()
                }
                return 200, {"open": begun, "answered": list(self._answered)}
        if path == "/a3po/images" and self.changes.get("images") is not False:
            return 200, {"refused": self.changes.get("refuses_images")}
        if path == "/server_info" and self.changes.get("dev_mode") is False:
            return 404, "not found"
        return (200, answers[path]) if path in answers else (404, "not found")

    def post(self, path: str, query: dict, body: dict) -> tuple[int, object]:
        self.calls.append(path if not query else f"{path}?mode={query['mode'][0]}")
        if path == "/pause":
            with self._state:
                self._paused = True
                if query["mode"][0] == "abort":
                    self._aborts += 1
                self._state.notify_all()
                self._state.wait_for(lambda: self._sampling == 0, 5)
            return 200, {"status": "paused"}
        if path == "/resume":
            with self._state:
                self._paused = False
                self._state.notify_all()
            return 200, {}
        if path == "/collective_rpc":
            if self.changes.get("refuses_weights"):
                return 500, "KeyError 'layers.0.self_attn.qkv_proj.weight'"
            if not self.changes.get("skips_load"):
                self.weight = first_number(body["kwargs"]["weights_path"])
            return 200, {"results": [None]}
        if path == "/v1/load_lora_adapter":
            if body["lora_name"] in self.adapters:
                return 400, "has already been loaded"
            try:
                self.adapters[body["lora_name"]] = first_number(body["lora_path"])
            except FileNotFoundError:
                return 404, f"No adapter found for {body['lora_path']}"
            return 200, "Success"
        if path == "/v1/unload_lora_adapter":
            return (200, "Success") if self.adapters.pop(body["lora_name"], None) is not None else (404, "not found")
        if path == "/init_weight_transfer_engine":
            return (200, {}) if "init_info" in body else (400, "Missing 'init_info' in request body")
        if path in ("/reset_encoder_cache", "/reset_mm_cache"):
            return 200, ""
        if path in ("/start_weight_update", "/update_weights", "/finish_weight_update"):
            return 200, {}
        return 404, "not found"

    def weight_of(self, model: str) -> float | None:
        return self.adapters.get(model) if self.lora else self.weight

    def sample(self, body: dict, emit, name: str | None = None) -> None:
        """Sample every sequence of a completion; `emit(index, token, logp, finish)` for each token, or one without."""
        prompts = body["prompt"] if isinstance(body["prompt"][0], list) else [body["prompt"]]
        with self._state:
            aborts = self._aborts
        done = [0] * (len(prompts) * body.get("n", 1))
        lengths = [1 + (7 * sum(prompts[0]) + 3 * index) % body["max_tokens"] for index in range(len(done))]
        stop = body.get("stop_token_ids") or []
        while any(length > position for length, position in zip(lengths, done, strict=True)):
            with self._state:
                self._state.wait_for(lambda: not self._paused or self._aborts != aborts or self._gone.is_set())
                if self._gone.is_set():
                    return
                if self._aborts != aborts:
                    break
                self._sampling += 1
                weight = self.weight_of(body["model"])
            sent = []
            for index, length in enumerate(lengths):
                if done[index] < length:
                    done[index] += 1
                    last = done[index] == length
                    finish = None
                    if last:
                        finish = "stop" if stop and length < body["max_tokens"] else "length"
                    token = stop[0] if finish == "stop" else 3 + (sum(prompts[0]) + done[index]) % 50
                    if last and finish == "length" and length < body["max_tokens"]:
                        lengths[index] = length + 1
                        finish = None
                    sent.append((index, token, logp_of(weight), finish))
                    self.tokens += 1
            with self._state:
                if name is not None:
                    self._counts[name] = list(zip(done, lengths, strict=True))
                self._sampling -= 1
                self._state.notify_all()
            for chunk in sent:
                emit(*chunk)
            time.sleep(self.step)
        for index, length in enumerate(lengths):
            if done[index] < length:
                emit(index, None, None, "abort")


class _Listener(ThreadingHTTPServer):
    allow_reuse_address = True
    request_queue_size = 256

    def handle_error(self, request, client_address):
        pass  # a client that went away


def _handler(stub: StubServer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *arguments):
            pass

        def setup(self):
            super().setup()
            stub._connections.add(self.connection)

        def finish(self):
            stub._connections.discard(self.connection)
            with contextlib.suppress(OSError):
                super().finish()

        def answer(self, status: int, payload) -> None:
            data = (payload if isinstance(payload, str) else json.dumps(payload)).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def do_GET(self):
            self.answer(*stub.get(urlsplit(self.path).path))

        def do_POST(self):
            url = urlsplit(self.path)
            data = self.rfile.read(int(self.headers["Content-Length"] or 0))
            kind, _, length = self.headers["Content-Type"].partition("; json=")
            images = unpacked(data[int(length) :]) if kind == TYPE else None
            body = json.loads(data[: int(length)] if kind == TYPE else data or "{}")
            if url.path == "/v1/completions":
                self.complete(body, images)
            else:
                self.answer(*stub.post(url.path, parse_qs(url.query), body))

        def complete(self, body: dict, images: tuple[list, dict] | None) -> None:
            if stub.weight_of(body["model"]) is None:
                self.answer(404, f"The model `{body['model']}` does not exist.")
                return
            if "logprob_token_ids" in body:
                self.answer(200, self.scores(body))
                return
            stub.bodies.append(body)
            stub.images.append(images)
            if images is not None and "cannot_use_images" in stub.changes:
                self.answer(400, {"error": {"message": stub.changes["cannot_use_images"]}})
                return
            fault = stub.faults.pop(0) if stub.faults else None
            if fault == "hang":
                stub._gone.wait(20)
            elif fault == "drip":
                self.send_response(200)
                self.send_header("Content-Length", "1000")
                self.end_headers()
                for _ in range(200):
                    self.wfile.write(b" ")
                    self.wfile.flush()
                    if stub._gone.wait(0.1):
                        return
            elif fault == "garbage":
                self.answer(200, "<html>Bad gateway</html>")
            elif fault == "500":
                self.answer(500, "EngineCore encountered an issue.")
            elif fault == "reset":
                self.connection.shutdown(socket.SHUT_RDWR)
            else:
                self.whole(body, fault)

        def scores(self, body: dict) -> dict:
            choices = []
            for index, _ in enumerate(body["prompt"]):
                logp = logp_of(stub.weight_of(body["model"]))
                top = {f"token_id:{token}": logp for token in body["logprob_token_ids"]}
                choices.append({"index": index, "token_ids": [3], "logprobs": {"top_logprobs": [top]}})
                stub.tokens += 1
            return {"choices": choices}

        def whole(self, body: dict, fault: str | None) -> None:
            choices = [
                {"index": i, "token_ids": [], "logprobs": {"token_logprobs": []}, "finish_reason": None}
                for i in range(body["n"])
            ]

            def emit(index, token, logp, finish):
                if token is not None:
                    choices[index]["token_ids"].append(token)
                    choices[index]["logprobs"]["token_logprobs"].append(logp)
                choices[index]["finish_reason"] = finish

            name = self.headers["X-Request-Id"]
            stub.sample(body, emit, name)
            with stub._state:
                if stub._counts.pop(name, None) is not None:
                    stub._answered.append(name)
            if fault == "misaligned":
                choices[0]["token_ids"].append(3)
            if fault == "nan":
                choices[0]["logprobs"]["token_logprobs"][0] = None
            self.answer(200, {"choices": choices})
            stub.served += 1

    return Handler
