"""What a server must be is checked at start, with the command that starts it right."""

import shlex

import pytest

from tests.engines.vllm.stub_server import StubServer
from tests.engines.vllm.stubbed import started
from trl_a3po.engines.vllm.servers.completions import logprobs_modes
from trl_a3po.errors import EngineError
from trl_a3po.protocol.engine import SamplingSettings

LACKS = [
    (False, {"version": "0.21.1"}, "it is vLLM 0.21.1, and 0.22 to 0.31 are supported"),
    (False, {"version": "0.32.0"}, "it is vLLM 0.32.0"),
    (False, {"dev_mode": False}, "VLLM_SERVER_DEV_MODE=1"),
    (False, {"logprobs_mode": "raw_logits"}, "--logprobs-mode is raw_logits"),
    (False, {"max_model_len": 16}, "its context is 16 tokens"),
    (True, {"max_lora_rank": 1}, "--max-lora-rank=1 is below the adapter's 2"),
    (True, {"max_loras": 2}, r"--max-loras=2 is below max_staleness \+ 2 = 4"),
    (True, {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": False}, "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 allows"),
]


@pytest.mark.parametrize(("lora", "lacks", "words"), LACKS, ids=[next(iter(lacks)) for _, lacks, _ in LACKS])
def test_what_a_server_lacks_is_named(tmp_path, lora, lacks, words):
    with pytest.raises(EngineError, match=words):
        started([StubServer(lora=lora, **lacks)], tmp_path)
    assert not list(tmp_path.glob("engine-*"))


def test_all_that_is_missing_is_named_at_once_with_a_command_that_has_it(tmp_path):
    server = StubServer(lora=True, max_lora_rank=1, max_loras=1, logprobs_mode="raw_logits")
    with pytest.raises(EngineError) as error:
        started([server], tmp_path)
    assert str(error.value).count(";") == 2
    (command,) = [line for line in str(error.value).splitlines() if "vllm serve" in line]
    words = shlex.split(command)
    assert "VLLM_SERVER_DEV_MODE=1" in words and "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1" in words
    for option, value in (
        ("--max-lora-rank", "8"),  # vLLM knows no 2
        ("--max-loras", "4"),
        ("--host", "127.0.0.1"),
        ("--port", str(server.port)),
    ):
        assert words[words.index(option) + 1] == value
    assert words[words.index("--logprobs-mode") + 1] == "processed_logprobs"


def test_a_server_with_adapters_enabled_takes_no_whole_weights(tmp_path):
    server = StubServer(lora=False)
    server.changes = {}
    server.get = _with_lora(server.get)
    with pytest.raises(EngineError, match="one server takes adapters or whole weights"):
        started([server], tmp_path)


def _with_lora(get):
    def changed(path):
        status, answer = get(path)
        if path == "/server_info":
            answer["vllm_config"]["lora_config"] = {"max_lora_rank": 16, "max_loras": 8}
        return status, answer

    return changed


def test_a_server_that_refuses_the_first_weights_is_named_with_its_words(tmp_path):
    with pytest.raises(EngineError, match=r"qkv_proj\.weight.*vllm_weights_dir"):
        started([StubServer(refuses_weights=True)], tmp_path)


def test_a_server_that_is_not_there_is_named_with_a_command(tmp_path):
    server = StubServer()
    server.kill()
    with pytest.raises(EngineError, match=rf"{server.url} did not answer.*\n.*\n.*vllm serve"):
        started([server], tmp_path, start_timeout=0.3)


def test_adapters_of_a_run_before_are_unloaded(tmp_path):
    server = StubServer(lora=True)
    server.adapters = {"policy-0ab1f2-v7-8": 7.0, "mine": 1.0}
    engine = started([server], tmp_path)
    engine.close()
    assert server.adapters == {"mine": 1.0}


@pytest.mark.parametrize(
    ("settings", "modes"),
    [
        ({}, ("processed_logprobs", "raw_logprobs")),
        ({"temperature": 0.7}, ("processed_logprobs",)),
        ({"top_p": 0.9}, ("raw_logprobs",)),
        ({"repetition_penalty": 1.1}, ("raw_logprobs",)),
    ],
)
def test_the_logprobs_mode_gives_behavior_log_probs(settings, modes):
    assert logprobs_modes(SamplingSettings(8, **settings)) == modes


def test_a_temperature_with_a_filter_has_no_mode_that_does():
    with pytest.raises(ValueError, match=r"temperature=0\.7 and top_k.*engine='transformers'"):
        logprobs_modes(SamplingSettings(8, temperature=0.7, top_k=5))
