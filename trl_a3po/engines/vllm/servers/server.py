"""One vLLM server: its endpoints by name, and what it says of itself.

Guarantees: each method is one call with a limit, raising `HttpFault`; nothing is retried here.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from trl_a3po.engines.vllm.servers.http import AnswerFault, Call, StatusFault, fetch_json, server_url
from trl_a3po.engines.vllm.servers.image_bodies import with_images
from trl_a3po.protocol.images import PromptImages

COUNTS, IMAGES = "/a3po/token_counts", "/a3po/images"
NO_EXTENSION = (
    "it lacks the extension a3po_images.py, which PYTHONPATH has to reach, with a3po_features.py, on its machine"
)
CONTROL_TIMEOUT = 30.0  # seconds for what takes a server no time
LOAD_TIMEOUT = 300.0  # seconds for loading weights


@dataclass(frozen=True)
class ServerInfo:
    """What a server says of itself.

    Args:
        version: of vLLM.
        model: the name its base model is served under.
        serves: the folder or name of its base model, if it says so.
        max_model_len: tokens of a prompt and its completion together.
        max_num_seqs: sequences it decodes at a time.
        logprobs_mode: what its log-probs are.
        max_lora_rank, max_loras: of its adapters; 0 without `--enable-lora`.
        loads_adapters: whether adapters can be loaded while it runs.
        transfer: backend of its `--weight-transfer-config`, or `None`.
        batch_invariant: whether a sequence's bits do not depend on what else it decodes.
        counts_tokens: whether it has the extension `a3po_server.py`.
        no_images: why its prompts cannot have images; `None` if they can, by the extension `a3po_images.py`.
        dev_mode: whether it has the endpoints that `VLLM_SERVER_DEV_MODE=1` opens; without them most of the above is
            unknown.
        adapters: names of the adapters it has loaded.
    """

    version: str
    model: str
    max_model_len: int
    max_num_seqs: int = 256
    logprobs_mode: str = "raw_logprobs"
    max_lora_rank: int = 0
    max_loras: int = 0
    loads_adapters: bool = False
    transfer: str | None = None
    batch_invariant: bool = False
    counts_tokens: bool = False
    no_images: str | None = NO_EXTENSION
    dev_mode: bool = False
    serves: str = ""
    adapters: tuple[str, ...] = ()


class TokenCounts:
    """How many tokens each named request of a paused server has.

    Raises:
        AnswerFault: `answer` is not what `a3po_server.py` says.
    """

    def __init__(self, answer: Any):
        try:
            self._answered = set(answer["answered"])
            self._open = {
                name: (bool(request["begun"]), {int(index): int(n) for index, n in request["tokens"].items()})
                for name, request in answer["open"].items()
            }
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise AnswerFault(f"{COUNTS} did not answer with counts: {str(answer)[:300]}.") from error

    def of(self, name: str, index: int) -> int | None:
        """Tokens of a sequence of a request; `None` if it is finished."""
        if name in self._answered:
            return None
        begun, tokens = self._open.get(name, (False, {}))
        return tokens.get(index, None if begun else 0)


class Server:
    """
    Args:
        url: where it answers, such as "http://localhost:8000"; a slash or /v1 at its end is left out.
    """

    def __init__(self, url: str):
        self.url = server_url(url)

    def completion(
        self, body: dict[str, Any], timeout: float, name: str | None = None, images: PromptImages | None = None
    ) -> Call:
        """The call for completions of a prompt, which shows `images`. With these, it has to have a name."""
        packed = None if images is None else partial(with_images, body, images)
        return Call(self.url, "POST", "/v1/completions", body, packed=packed, timeout=timeout, name=name)

    def token_counts(self) -> "TokenCounts":
        """How many tokens each named request has. Needs the extension `a3po_server.py`."""
        return TokenCounts(self._get(COUNTS))

    def ping(self, timeout: float = 5.0) -> None:
        """Return if it is able to serve."""
        Call(self.url, "GET", "/health", timeout=timeout).text()

    def info(self) -> ServerInfo:
        version = self._get("/version")
        models = self._get("/v1/models")
        try:
            base = next(model for model in models["data"] if not model.get("parent"))
            known = {"version": str(version["version"]), "model": base["id"], "max_model_len": base["max_model_len"]}
            known["adapters"] = tuple(model["id"] for model in models["data"] if model.get("parent"))
        except (KeyError, TypeError, StopIteration) as error:
            raise AnswerFault(f"{self.url} does not answer like vLLM: {str(models)[:300]}.") from error
        try:
            # The first answer collects facts of the machine, which takes seconds.
            info = fetch_json(self.url, "GET", "/server_info?config_format=json", timeout=2 * CONTROL_TIMEOUT)
        except StatusFault as fault:
            if fault.status != 404:
                raise
            return ServerInfo(**known)
        counts_tokens, no_images = self._counts_tokens(), self._no_images()
        return ServerInfo(**known, **_configured(info), counts_tokens=counts_tokens, no_images=no_images)

    def pause(self, mode: Literal["keep", "abort"]) -> None:
        """Stop sampling. "keep" leaves sequences and their caches as they are; "abort" ends them as they are, so that
        their calls return."""
        # With clear_cache, "keep" would have every sequence's cache computed anew.
        self._post(f"/pause?mode={mode}&clear_cache=false")

    def resume(self) -> None:
        self._post("/resume")

    def load_adapter(self, name: str, folder: str) -> None:
        body = {"lora_name": name, "lora_path": folder}
        Call(self.url, "POST", "/v1/load_lora_adapter", body, timeout=LOAD_TIMEOUT).text()

    def unload_adapter(self, name: str) -> None:
        """Have it forget an adapter; one that was started again never had it."""
        body = {"lora_name": name}
        try:
            Call(self.url, "POST", "/v1/unload_lora_adapter", body, timeout=CONTROL_TIMEOUT).text()
        except StatusFault as fault:
            if fault.status != 404:
                raise

    def reload_weights(self, folder: str) -> None:
        """Load a checkpoint over the weights it has."""
        body = {"method": "reload_weights", "kwargs": {"weights_path": folder}}
        self._post("/collective_rpc", body, LOAD_TIMEOUT)

    def forget_images(self) -> None:
        """Have it read and encode every image anew, which weights that are loaded do not bring about: vLLM keeps what
        its vision tower made of an image."""
        self._post("/reset_encoder_cache")
        self._post("/reset_mm_cache")

    def post(self, path: str, body: Any = None, timeout: float = CONTROL_TIMEOUT) -> Any:
        return self._post(path, body, timeout)

    def get(self, path: str) -> Any:
        return self._get(path)

    def _counts_tokens(self) -> bool:
        try:
            self.token_counts()
        except StatusFault as fault:
            if fault.status not in (404, 405):
                raise
            return False
        return True

    def _no_images(self) -> str | None:
        try:
            # The first answer loads the processor, which takes seconds.
            answer = fetch_json(self.url, "GET", IMAGES, timeout=2 * CONTROL_TIMEOUT)
        except StatusFault as fault:
            if fault.status not in (404, 405):
                raise
            return NO_EXTENSION
        refused = answer.get("refused", answer) if isinstance(answer, dict) else answer
        if refused is not None and not isinstance(refused, str):
            raise AnswerFault(f"{IMAGES} did not answer whether prompts may have images: {str(answer)[:300]}.")
        return refused

    def _get(self, path: str) -> Any:
        return fetch_json(self.url, "GET", path, timeout=CONTROL_TIMEOUT)

    def _post(self, path: str, body: Any = None, timeout: float = CONTROL_TIMEOUT) -> Any:
        return fetch_json(self.url, "POST", path, {} if body is None else body, timeout=timeout)


def _configured(info: Mapping[str, Any]) -> dict[str, Any]:
    try:
        config, environment = info["vllm_config"], info.get("vllm_env") or {}
        device = (config.get("device_config") or {}).get("device")
        lora, transfer = config.get("lora_config") or {}, config.get("weight_transfer_config") or {}
        return {
            "dev_mode": True,
            "max_num_seqs": config["scheduler_config"]["max_num_seqs"],
            "logprobs_mode": config["model_config"]["logprobs_mode"],
            "max_lora_rank": lora.get("max_lora_rank", 0),
            "max_loras": lora.get("max_loras", 0),
            "loads_adapters": bool(environment.get("VLLM_ALLOW_RUNTIME_LORA_UPDATING")),
            "transfer": transfer.get("backend"),
            # On a CPU the variable is read, and changes nothing.
            "batch_invariant": bool(environment.get("VLLM_BATCH_INVARIANT")) and device != "cpu",
            "serves": str(config["model_config"].get("model", "")),
        }
    except (KeyError, TypeError, AttributeError) as error:
        raise AnswerFault(f"/server_info lacks {error}, which vLLM 0.22 to 0.31 have: {str(info)[:200]}.") from error
