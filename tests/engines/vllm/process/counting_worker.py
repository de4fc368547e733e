"""The worker of vLLM's engine, which also writes how much of each sequence vLLM had cached: for every sequence that
begins, a line with the tokens that it continues and how many of them the prefix cache had, to the file
`CACHED_TOKENS`."""

import os

from trl_a3po.engines.vllm.process import vllm_core
from trl_a3po.engines.vllm.process.vllm_worker import _set_up
from trl_a3po.engines.worker_loop import run_worker


class CountingCore(vllm_core.VLLMCore):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        step = self._core.step_fn

        def counted():
            outputs, executed = step()
            stats = [output.prefill_stats for client in (outputs or {}).values() for output in client.outputs]
            with open(os.environ["CACHED_TOKENS"], "a") as file:
                file.writelines(f"{one.num_prompt_tokens} {one.num_cached_tokens}\n" for one in stats if one)
            return outputs, executed

        self._core.step_fn = counted


if __name__ == "__main__":
    vllm_core.VLLMCore = CountingCore
    run_worker(_set_up)
