"""The generation queue: it keeps an engine busy ahead of training, within a bound on staleness.

Where to look:

- whether a prompt may be submitted: `QueueCore.admission` in `core`, with the arithmetic of the bound in `take_plan`;
- which groups a take hands out: `take_order`;
- when the takes of a run happen: `take_clock`;
- what became of every prompt: `outcomes`;
- which finished groups are rejected: `group_filter`;
- threads and waiting: `queue` (the main thread's side), `threads` (the background), `shared_state` (what they share);
- why a wait lasts, in words: `wait_reasons`.
"""
