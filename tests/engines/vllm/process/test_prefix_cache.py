"""What a real vLLM finds in its prefix cache, by its own count, when an episode goes on."""

import random
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.engines.transformers.running import events_of, train
from tests.engines.vllm.real_vllm import vllm_python
from tests.tiny import VOCAB, tiny_config
from trl_a3po.engines.vllm.process import vllm_engine
from trl_a3po.protocol.engine import GroupRequest, SamplingSettings
from trl_a3po.publish.collect import collect_weights, policy_spec

ROOT = Path(__file__).parents[4]
BLOCK = 32  # tokens that vLLM caches as one: the fewest on a CPU, where it takes 128 if nothing is said
PROMPT, TURN, RESULT = 200, 40, 20


class Episodes:
    """Episodes of one rollout, played on a real vLLM that counts."""

    def __init__(self, folder, mode):
        torch.manual_seed(0)
        self.model = AutoModelForCausalLM.from_config(tiny_config(head_dim=64, max_position_embeddings=1024))
        self.file, self.version = folder / "cached", 0
        python = folder / "python"  # an interpreter of another environment is not given the import path
        python.write_text(f'#!/bin/sh\nPYTHONPATH="{ROOT}" exec "{vllm_python()}" "$@"\n')
        python.chmod(0o755)
        self.engine = vllm_engine.VLLMEngine(
            slots=2, python=str(python), kv_on_publish=mode, context=1024, threads=1, options={"block_size": BLOCK}
        )
        self.requests, self.known, self.noise = 0, {}, random.Random(0)
        spec, update = policy_spec(self.model, torch.float32), collect_weights(self.model, 0, complete=True)
        self.engine.start(spec, SamplingSettings(TURN), update)

    def publish(self):
        train(self.model)
        self.version += 1
        self.engine.publish(collect_weights(self.model, self.version, complete=True))

    def turn(self, episode: int) -> tuple[int, int]:
        """Play a turn. Returns how many tokens it continues, and how many of them were found in the cache."""
        first = tuple(random.Random(0).choices(range(3, VOCAB), k=PROMPT))  # the same of every episode
        known = self.known.setdefault(episode, first)
        one = GroupRequest(self.requests, 0, known, 1, first_position=len(known) - PROMPT, first_episode=episode)
        self.requests += 1
        self.engine.submit([one])
        (rollout,) = events_of(self.engine, [one.request_id])[one.request_id].rollouts
        result = self.noise.choices(range(3, VOCAB), k=RESULT)
        self.known[episode] = (*known, *rollout.token_ids, *result)
        (line,) = self.file.read_text().splitlines()
        self.file.write_text("")
        return tuple(map(int, line.split()))


@pytest.fixture
def episodes(request, tmp_path, monkeypatch):
    monkeypatch.setattr(vllm_engine, "WORKER", "tests.engines.vllm.process.counting_worker")
    monkeypatch.setenv("CACHED_TOKENS", str(tmp_path / "cached"))
    made = Episodes(tmp_path, request.param)
    yield made
    made.engine.close()


def blocks(tokens: int) -> int:
    """The tokens of these that whole blocks hold."""
    return tokens // BLOCK * BLOCK


@pytest.mark.vllm
@pytest.mark.timeout(900)
@pytest.mark.parametrize("episodes", ["keep", "recompute"], indirect=True)
def test_a_later_turn_finds_the_turns_before_and_after_a_publish_only_kept_ones(episodes, request):
    keeps = request.node.callspec.params["episodes"] == "keep"
    second, third = PROMPT + TURN + RESULT, PROMPT + 2 * (TURN + RESULT)
    # Of the turn before, vLLM has read all tokens but the last.
    assert episodes.turn(0) == (PROMPT, 0)
    assert episodes.turn(0) == (second, blocks(PROMPT + TURN - 1))
    episodes.publish()
    assert episodes.turn(0) == (third, blocks(second + TURN - 1) if keeps else 0)
    # The same prompt in another episode: what was read under the weights of now, and nothing older.
    assert episodes.turn(1) == (PROMPT, 0 if keeps else blocks(PROMPT - 1))
    assert episodes.turn(2) == (PROMPT, blocks(PROMPT - 1))
