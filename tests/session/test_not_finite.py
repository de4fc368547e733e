"""Where nothing can be sampled any more, the error says so if it is the weights that are not finite."""

import math

import pytest
import torch
from transformers import TrainerCallback

from tests.runs import COMPLETE, build
from trl_a3po.errors import EngineError, GenerationFailed
from trl_a3po.protocol.engine import GroupFailed
from trl_a3po.testing import StubEngine


class FailingEngine(StubEngine):
    """Fails every request after the first publish of trained weights, as a server does whose answers hold NaN."""

    def submit(self, requests):
        if self.version:
            self._events += [GroupFailed(request.request_id, "the answer is malformed") for request in requests]
        else:
            super().submit(requests)


class Spoil(TrainerCallback):
    """Puts `value` into one weight after the first step."""

    def __init__(self, value):
        self.value = value

    @torch.no_grad()
    def on_step_end(self, args, state, control, model=None, **kwargs):
        model.model.norm.weight[-1] = self.value


@pytest.mark.parametrize("value", [math.nan, -math.inf])
def test_weights_that_are_not_finite_are_named(model_path, tmp_path, value):
    trainer = build(str(model_path), tmp_path, engine=FailingEngine(COMPLETE), callbacks=[Spoil(value)])
    with pytest.raises(EngineError, match=r"not finite any more \('model\.norm\.weight'\).*newest checkpoint") as info:
        trainer.train()
    assert isinstance(info.value.__cause__, GenerationFailed)


def test_another_failure_stays_what_it_is(model_path, tmp_path):
    trainer = build(str(model_path), tmp_path, engine=FailingEngine(COMPLETE))
    with pytest.raises(GenerationFailed, match="the answer is malformed"):
        trainer.train()
