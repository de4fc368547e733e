"""What a worker process inherits."""

from trl_a3po.workers.process import worker_environment


def test_a_worker_does_not_inherit_a_ranks_identity(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "LOCAL_RANK", "TORCHELASTIC_RUN_ID", "ACCELERATE_USE_FSDP"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    environment = worker_environment(threads=2)
    assert not {"RANK", "WORLD_SIZE", "MASTER_ADDR", "LOCAL_RANK", "TORCHELASTIC_RUN_ID"} & set(environment)
    assert "ACCELERATE_USE_FSDP" not in environment
    assert environment["CUDA_VISIBLE_DEVICES"] == "3" and environment["OMP_NUM_THREADS"] == "2"
