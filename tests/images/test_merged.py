"""`lora_sync="merged"` with vision-language models: the adapter is in the weights of a plain model."""

import pytest
import torch
from peft import LoraConfig, get_peft_model

from tests.vision import FAMILIES
from trl_a3po.models.replica import build_replica, load_update
from trl_a3po.publish.merged import collect_merged, merged_spec

pytestmark = pytest.mark.long


@pytest.mark.parametrize("family", FAMILIES)
def test_the_merged_model_is_that_of_peft(family):
    torch.manual_seed(0)
    lora = LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
    model = get_peft_model(FAMILIES[family].model(), lora)
    replica = build_replica(merged_spec(model, torch.float32), "cpu")
    load_update(replica, collect_merged(model, 0))
    ids = torch.tensor([[20, 21, 22, 23]])
    assert torch.allclose(replica(ids).logits, model.eval()(ids).logits, atol=1e-3)
