"""CUDA IPC on a GPU: another process opens what it is told of, and a vLLM server there follows the trainer."""

import base64
import pickle

import pytest
import torch
from torch.multiprocessing.reductions import rebuild_cuda_tensor
from transformers import AutoModelForCausalLM

from tests.tiny import tiny_config
from trl_a3po.engines.vllm.ipc import IpcTransfer, update_info
from trl_a3po.engines.vllm.nccl import buckets
from trl_a3po.engines.vllm.vllm_engine import VLLMEngine
from trl_a3po.protocol.engine import SamplingSettings
from trl_a3po.protocol.weights import WeightUpdate
from trl_a3po.publish.collect import collect_weights, policy_sources, policy_spec
from trl_a3po.publish.delivery import DeliveryCheck, ProbeTokens
from trl_a3po.publish.local_policy import LocalPolicy

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")]


def opened(told, answers) -> None:
    """The process of a server: opens the tensors as vLLM 0.22 to 0.31 do, and says what is in them."""
    uuid = str(torch.cuda.get_device_properties(0).uuid)
    sums = []
    for handle in pickle.loads(base64.b64decode(told["ipc_handles_pickled"])):
        arguments = list(handle[uuid])
        arguments[6] = 0
        sums.append(rebuild_cuda_tensor(*arguments).double().sum().item())
    answers.put(sums)


def test_another_process_opens_the_tensors_as_they_are():
    gpu = torch.device("cuda", 0)
    update = WeightUpdate(0, {f"w{i}": torch.randn(300 + i, 7, device=gpu) for i in range(5)})
    (bucket,) = buckets(update, gpu, torch.bfloat16, 2**30, copies=True)
    torch.cuda.synchronize()
    told = update_info(bucket, str(torch.cuda.get_device_properties(gpu).uuid))
    context = torch.multiprocessing.get_context("spawn")
    answers = context.Queue()
    server = context.Process(target=opened, args=(told, answers))
    server.start()
    try:
        assert answers.get(timeout=120) == [tensor.double().sum().item() for _, tensor in bucket]
    finally:
        server.join(30)
    assert told["dtype_names"] == ["bfloat16"] * 5 and told["shapes"] == [[300 + i, 7] for i in range(5)]


@pytest.mark.vllm
@pytest.mark.timeout(900)
def test_a_server_on_the_trainers_gpu_follows_it(vllm_python, tmp_path):
    config = tiny_config(
        vocab_size=1024,
        hidden_size=512,
        intermediate_size=1024,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=128,
        max_position_embeddings=1024,
        tie_word_embeddings=False,
        initializer_range=0.05,
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).to("cuda:0")
    engine = VLLMEngine(
        [],
        folder=tmp_path,
        trainer_device="cuda:0",
        device="cuda:0",
        python=vllm_python,
        gpu_memory=0.3,
        max_prompt_tokens=64,
    )
    try:
        sampling = SamplingSettings(32)
        engine.start(policy_spec(model, torch.bfloat16), sampling, collect_weights(model, 0, complete=True))
        assert isinstance(engine._serving.publishing._transfer, IpcTransfer)
        known = ProbeTokens.of_prompts([list(range(100, 110)), list(range(200, 210))], 8)
        policy = LocalPolicy(model, policy_sources)
        DeliveryCheck(engine, policy, known, temperature=1.0, every=1, timeout=60).at_start(0)
    finally:
        engine.close()
