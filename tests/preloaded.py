"""What `tests.forked` has imported before its processes begin."""

import contextlib
import gc

import tests.distributed.runs  # noqa: F401
import trl_a3po.trainer  # noqa: F401

with contextlib.suppress(ImportError):  # accelerate imports it in every process that saves a model
    import deepspeed  # noqa: F401

gc.collect()
gc.freeze()
