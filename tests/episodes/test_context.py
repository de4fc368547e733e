"""How long an episode may become."""

from types import SimpleNamespace

import pytest

from tests.tiny import tiny_config
from trl_a3po import A3POConfig
from trl_a3po.session import build_episodes


@pytest.mark.parametrize(
    "settings, context", [({"engine": "vllm", "vllm_max_model_length": 48}, 48), ({"engine": "vllm"}, 64), ({}, 64)]
)
def test_an_episode_fits_into_the_context_of_the_engine(monkeypatch, tmp_path, settings, context):
    """vLLM holds no more than `vllm_max_model_length`, which may be less than the model could."""
    monkeypatch.setattr(build_episodes, "EpisodeRunner", lambda *arguments, **options: options)
    args = A3POConfig(str(tmp_path), use_cpu=True, **settings)
    trainer = SimpleNamespace(
        args=args,
        reward_func_names=["reward"],
        max_completion_length=args.max_completion_length,
        model=SimpleNamespace(config=tiny_config(max_position_embeddings=64)),
    )
    assert build_episodes._runner(trainer, None, None, None, None)["context"] == context
