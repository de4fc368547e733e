"""`compare_proximal_every`: measured against the identity `gap = |log ρ|/D`, and without a trace in the training."""

import pytest
import torch

from tests.runs import build, logged, train_recorded
from trl_a3po.objectives import ProximalComparison, proximal_logps


def test_at_the_first_minibatch_the_gap_is_the_log_ratio_divided_by_staleness():
    generator = torch.Generator().manual_seed(0)
    lb, lt = torch.randn(2, 3, 5, generator=generator, dtype=torch.float64)
    d = torch.randint(1, 4, (3, 5), generator=generator)
    lp = proximal_logps(lb, lt, d)
    ones = torch.ones(3, 5)
    tally = ProximalComparison.of_batch(lt, lb, d, ones[:, 0], ones, proximal_logps=lp, recomputed_logps=lt)
    metrics = tally.named("first")
    assert metrics["a3po/compare/first/gap/mean"] == pytest.approx(((lt - lb).abs() / d).mean().item())
    assert (
        metrics["a3po/compare/first/r_recomputed/mean"] == 1 and metrics["a3po/compare/first/clipped_recomputed"] == 0
    )
    high = ((lt - lb) / d).exp() > 1.2
    assert metrics["a3po/compare/first/clipped"] == pytest.approx(high.double().mean().item())


def test_a_run_compares_as_often_as_told_and_trains_the_same(model_path, tmp_path):
    settings = {"schedule": "fixed_lag", "max_staleness": 2, "num_iterations": 2, "max_steps": 8}
    plain = train_recorded(build(model_path, tmp_path / "plain", **settings))
    trainer = build(model_path, tmp_path / "compared", compare_proximal_every=4, **settings)
    compared = train_recorded(trainer)
    for mine, theirs in zip(compared, plain, strict=True):
        assert all(torch.equal(mine[name], theirs[name]) for name in theirs)
    assert len(logged(trainer, "a3po/compare/first/gap/mean")) == 2  # batches taken at 0 and 4
    assert len(logged(trainer, "a3po/compare/later/gap/mean")) == 2
    assert max(logged(trainer, "a3po/compare/first/r_recomputed/max")) == pytest.approx(1, abs=1e-5)


def test_a_second_training_compares_from_its_beginning(model_path, tmp_path):
    trainer = build(model_path, tmp_path, compare_proximal_every=4, max_steps=3)
    for times in (1, 2):
        trainer.train()
        assert len([entry for entry in trainer.state.log_history if "a3po/compare/first/gap/mean" in entry]) == 1, (
            times
        )
