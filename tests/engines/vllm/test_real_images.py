"""Images on real vLLM servers: what is recorded is what a clean forward gives, under the weights of the stamped
version, by the trainer's own arrays; a publish leaves nothing of what the vision tower made of an image before."""

import dataclasses
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path

import pytest
import torch

from recipes.benchmarks.vllm_server import VLLMServer
from tests.engines.transformers.running import events_of, train
from tests.engines.vllm.conftest import serving
from tests.engines.vllm.real_pictures import (
    TOLERANCE,
    WholeProcessor,
    check_stamps,
    policy,
    request,
    sampling_of,
    weights_of,
)
from tests.images.pictured import pictured, pictured_turns, with_pictures
from tests.runs import logged
from tests.vision import picture
from tests.workers.processes import until
from trl_a3po.engines.vllm.servers.checkpoint_folder import CheckpointFolder
from trl_a3po.engines.vllm.servers.completions import completion_body
from trl_a3po.engines.vllm.servers.http import StatusFault
from trl_a3po.engines.vllm.servers.server import COUNTS, Server
from trl_a3po.engines.vllm.servers.token_chunks import TokenChunk, parse_answer
from trl_a3po.engines.vllm.servers.vllm_servers import VLLMServers
from trl_a3po.errors import EngineError
from trl_a3po.protocol.engine import GroupFailed
from trl_a3po.publish.collect import collect_weights, policy_spec

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

ROLLOUTS = 2  # of each request
QUICK = [("qwen2_5_vl", "whole"), ("idefics3", "adapter")]
SLOW = [("qwen2_5_vl", "adapter"), ("qwen3_vl", "whole"), ("idefics3", "whole"), ("llava_next", "whole")]


def serving_images(python: str, folder: Path, name: str, what: str) -> AbstractContextManager[list[VLLMServer]]:
    """A server, not yet started, that has the policy `name` and takes `what` of it."""
    model, processor = policy(name, adapter=False)
    checkpoint = CheckpointFolder(folder, policy_spec(model, torch.float32))
    checkpoint.write(collect_weights(model, 0, complete=True))
    WholeProcessor(processor).save_pretrained(checkpoint.folder)
    adapters = {"max_lora_rank": 8, "max_loras": 4} if what == "adapter" else {}
    settings = {"longest": 1024, "context": 1024, "logprobs_modes": ("raw_logprobs",), "counts_tokens": True}
    return serving(python, str(checkpoint.folder), folder, images=True, **settings, **adapters)


@pytest.fixture(scope="module")
def quick(vllm_python, tmp_path_factory):
    """The servers of `QUICK`, which want a key, started at the same time."""
    servers = [serving_images(vllm_python, tmp_path_factory.mktemp("images"), *case) for case in QUICK]
    with pytest.MonkeyPatch.context() as patch, ExitStack() as stack, ThreadPoolExecutor() as threads:
        patch.setenv("VLLM_API_KEY", "of-these-tests")
        yield dict(zip(QUICK, threads.map(stack.enter_context, servers), strict=True))


@pytest.fixture(
    scope="module", params=[*QUICK, *(pytest.param(case, marks=pytest.mark.slow) for case in SLOW)], ids="-".join
)
def served(request, vllm_python, tmp_path_factory):
    """The name of a policy, what of it is trained, and the URL of a server that has it."""
    if request.param in QUICK:
        (server,) = request.getfixturevalue("quick")[request.param]
        yield *request.param, server.server.url
    else:
        with serving_images(vllm_python, tmp_path_factory.mktemp("images"), *request.param) as (server,):
            yield *request.param, server.server.url


def paused_in_the_middle(engine: VLLMServers, url: str, requests) -> bool:
    """Submit `requests`, and pause the server when all of their rollouts have tokens. Whether none has ended by then;
    otherwise the requests are cancelled."""
    server = Server(url)

    def under_way() -> bool:
        counts = [list(open_["tokens"].values()) for open_ in server.get(COUNTS)["open"].values()]
        return len(counts) == len(requests) and all(len(c) == ROLLOUTS and min(c) > 0 for c in counts)

    engine.submit(requests)
    until(lambda: under_way() or engine.stats().active_rollouts < ROLLOUTS * len(requests))
    server.pause("keep")
    if under_way():
        return True
    engine.cancel([asked.request_id for asked in requests])
    server.resume()
    return False


@pytest.mark.parametrize("kv_on_publish", ["keep", "recompute"])
def test_a_publish_leaves_nothing_of_the_images_before(served, kv_on_publish, tmp_path):
    name, what, url = served
    model, processor = policy(name, what == "adapter")
    first, second, third = picture(1), picture(2, 30, 18), picture(3, 12, 28)
    before = [request(processor, 0, first), request(processor, 1, second, third), request(processor, 2)]
    after = [dataclasses.replace(before[0], request_id=100), request(processor, 101, third), request(processor, 102)]
    other = request(processor, 103, first, second)
    wrong = dataclasses.replace(other, prompt_ids=before[0].prompt_ids)
    engine = VLLMServers([url], folder=tmp_path, kv_on_publish=kv_on_publish, kept_versions=4, images=True)
    try:
        engine.start(
            policy_spec(model, torch.float32),
            sampling_of(processor, 1.0, 150),
            collect_weights(model, 0, complete=True),
        )
        states = [weights_of(model)]
        for attempt in range(1, 20):
            if paused_in_the_middle(engine, url, before):
                break
            before = [dataclasses.replace(asked, request_id=3 * attempt + n) for n, asked in enumerate(before)]
        train(model, scale=0.05)
        states.append(weights_of(model))
        engine.publish(collect_weights(model, 1, complete=False))
        Server(url).resume()  # which a publish does that has paused it
        engine.submit([*after, wrong])
        events = events_of(engine, [asked.request_id for asked in (*before, *after, wrong)])
    finally:
        engine.close()
    spans = check_stamps(model, states, [*before, *after], events, kv_on_publish=kv_on_publish, temperature=1.0)
    spanning = (0,) if (what, kv_on_publish) == ("adapter", "keep") else (0, 1)
    assert spans == {(images, *span) for images in (True, False) for span in (spanning, (1,))}
    failed = events[wrong.request_id]
    assert isinstance(failed, GroupFailed) and "vLLM finds 1 of 2 images in the prompt's tokens" in failed.reason


def test_a_run_trains_on_prompts_with_and_without_images(quick, tmp_path):
    (server,) = quick["qwen2_5_vl", "whole"]
    model, processor = policy("qwen2_5_vl", adapter=False)
    trainer = pictured(
        "qwen2_5_vl",
        tmp_path,
        model=model,
        processing_class=processor,
        train_dataset=with_pictures([1, 0, 2, 1, 0, 1, 2, 0]),
        engine="vllm",
        vllm_server_urls=[server.server.url],
        max_staleness=1,
        max_steps=4,
        kv_on_publish="recompute",
        delivery_check_steps=2,
    )
    trainer.train()
    assert trainer.state.global_step == 4
    gaps = [*logged(trainer, "a3po/delivery/gap"), *logged(trainer, "a3po/engine_gap/max")]
    assert gaps and max(gaps) < TOLERANCE


def test_a_run_trains_on_turns_that_add_pictures(quick, tmp_path):
    (server,) = quick["qwen2_5_vl", "whole"]
    model, processor = policy("qwen2_5_vl", adapter=False)
    trainer = pictured(
        "qwen2_5_vl",
        tmp_path,
        model=model,
        processing_class=processor,
        train_dataset=with_pictures([1, 0, 2, 1]),
        rollout_func=pictured_turns,
        engine="vllm",
        vllm_server_urls=[server.server.url],
        max_completion_length=200,
        max_staleness=1,
        max_steps=3,
        kv_on_publish="recompute",
        delivery_check_steps=2,
    )
    trainer.train()
    assert trainer.state.global_step == 3
    gaps = [*logged(trainer, "a3po/delivery/gap"), *logged(trainer, "a3po/engine_gap/max")]
    assert gaps and max(gaps) < TOLERANCE
    assert logged(trainer, "a3po/episodes/turns") == [3.0] * 3


def test_images_without_the_servers_key_are_not_answered(quick, monkeypatch):
    (server,) = quick["qwen2_5_vl", "whole"]
    _, processor = policy("qwen2_5_vl", adapter=False)
    asked = request(processor, 0, picture(1))
    body = completion_body(
        sampling_of(processor, 1.0, length=4), "policy", "salt", asked.prompt_ids, count=ROLLOUTS, done=0
    )

    def answer() -> list[TokenChunk]:
        call = server.server.completion(body, 60.0, "a3po-0-0", asked.images)
        return parse_answer(call.data(), ROLLOUTS)

    assert all(len(chunk.token_ids) == 4 for chunk in answer())
    monkeypatch.delenv("VLLM_API_KEY")
    with pytest.raises(StatusFault, match="answered 401"):
        answer()


@pytest.mark.slow
def test_attention_in_both_directions_which_vllm_lacks_on_a_cpu_is_refused(vllm_python, tmp_path):
    model, processor = policy("gemma3", adapter=False)
    with serving_images(vllm_python, tmp_path, "gemma3", "whole") as (server,):
        engine = VLLMServers([server.server.url], folder=tmp_path / "engine", images=True)
        with pytest.raises(EngineError, match=r"cannot have images.*both directions in Gemma3.*CPU_ATTN"):
            sampling = sampling_of(processor, 1.0, length=4)
            engine.start(policy_spec(model, torch.float32), sampling, collect_weights(model, 0, complete=True))
