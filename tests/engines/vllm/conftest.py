"""Real vLLM servers, in an environment of their own, shared by all tests marked `vllm`."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from recipes.benchmarks.vllm_server import VLLMServer
from tests.distributed.launch import free_port
from tests.engines.vllm import real_vllm
from trl_a3po.engines.vllm.servers.startup import ServerRequirements

START_TIMEOUT = 300.0


@pytest.fixture(scope="session")
def vllm_python() -> str:
    return real_vllm.vllm_python()


@pytest.fixture(scope="session")
def tied_model() -> str:
    from recipes.smollm2 import smollm2_path

    return smollm2_path()


@pytest.fixture(scope="session")
def untied_model(tied_model, tmp_path_factory) -> str:
    """The same with an output layer of its own: reloading weights, vLLM's build for CPUs forgets a tied one."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = tmp_path_factory.mktemp("untied")
    model = AutoModelForCausalLM.from_pretrained(tied_model, dtype=torch.float32)
    weights = dict(model.state_dict())
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    model.config.tie_word_embeddings = False
    untied = type(model)(model.config)
    untied.load_state_dict(weights)
    untied.save_pretrained(folder)
    AutoTokenizer.from_pretrained(tied_model).save_pretrained(folder)
    return str(folder)


@contextlib.contextmanager
def serving(python: str, model: str, folder: Path, *, count: int = 1, **requirements) -> Iterator[list[VLLMServer]]:
    """Servers of `model`, one CPU thread each, ready."""
    settings = {"longest": 512, "context": 512, "logprobs_modes": ("processed_logprobs",)} | requirements
    requirements = ServerRequirements(model, "float32", options={"--max-num-seqs": "16"}, **settings)
    servers = [
        VLLMServer(python, requirements, torch.device("cpu"), folder / f"log-{n}", port=free_port(), threads=1)
        for n in range(count)
    ]
    try:
        for server in servers:
            server.wait_until_ready(START_TIMEOUT)
        yield servers
    finally:
        for server in servers:
            server.stop()


@pytest.fixture(scope="session")
def adapter_server(vllm_python, tied_model, tmp_path_factory):
    """URL of a server that takes adapters."""
    with serving(vllm_python, tied_model, tmp_path_factory.mktemp("a"), max_lora_rank=8, max_loras=4) as (server,):
        yield server.server.url


@pytest.fixture(scope="session")
def weights_server(vllm_python, untied_model, tmp_path_factory):
    """URL of a server that takes whole weights."""
    with serving(vllm_python, untied_model, tmp_path_factory.mktemp("w"), counts_tokens=True) as (server,):
        yield server.server.url
