"""Reward functions in processes: what reaches them and comes back, and what is left when one hangs or dies."""

import asyncio
import copy
import itertools
import logging
import math
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

from tests.workers.processes import is_reaped, until
from trl_a3po.errors import RewardError, StallError
from trl_a3po.protocol.records import Group, Prompt, Rejection, Rollout, Score
from trl_a3po.rewards import scorer
from trl_a3po.rewards.worker_pool import RewardWorkers
from trl_a3po.rewards.worker_process import RewardTraceback

LONG = 3600.0


def group(index=0, **columns):
    rollouts = [Rollout([5, 6 + i], [-1.0, -2.0], [0, 0]) for i in range(2)]
    return Group(Prompt(index, {"prompt": "p", **columns}, [1, 2]), rollouts)


def completions(group):
    return [f"c{rollout.token_ids}" for rollout in group.rollouts]


def state(group):
    """The trainer's state, anew for each group."""
    return SimpleNamespace(global_step=3, log_history=[{"loss": 1.0, "step": 2}])


@pytest.fixture
def started():
    pools = []

    def start(*funcs, workers=1, decode=completions, state=state, **settings):
        names = [f"reward{i}" for i in range(len(funcs))]
        pools.append(RewardWorkers(funcs, names, decode, state, workers=workers, **settings))
        pools[-1].start()
        return pools[-1]

    yield start
    for pool in pools:
        pool.close()


def test_a_worker_that_is_killed_while_it_starts_is_replaced_and_the_group_scored(started, caplog):
    pool = started(lambda completions, **kwargs: [1.0] * len(completions))
    os.kill(pool._idle[0].process.pid, signal.SIGKILL)
    assert pool(group()).rewards == [[1.0], [1.0]]
    assert "Another one is started" in caplog.text


def by_target(calls):
    """A closure that does what the row's `target` asks for, and otherwise rewards."""

    def reward(completions, target, **kwargs):
        calls.append(1)
        match target[0]:
            case "hang":
                time.sleep(LONG)
            case "die":
                os._exit(3)
            case "raise":
                raise KeyError("gold")
            case "exit":
                sys.exit("enough")
        return [len(calls), os.getpid()]

    return reward


# --- what goes in and comes out -----------------------------------------------------------------------------------


def test_closures_lambdas_and_async_functions_run_in_one_other_process_and_keep_their_state(started):
    calls = []

    async def later(completion_ids, **kwargs):
        return [float(sum(ids)) for ids in completion_ids]

    workers = started(by_target(calls), lambda **kwargs: [None, 0.5], later, None)
    first, second = (workers(group(target="reward")).rewards for _ in range(2))
    assert [row[1:3] for row in first] == [[pytest.approx(math.nan, nan_ok=True), 11.0], [0.5, 12.0]]
    assert all(math.isnan(row[3]) for row in first)
    assert (first[0][0], second[0][0], calls) == (1, 2, [])
    assert first[1][0] == second[1][0] != os.getpid()


def test_a_function_receives_what_it_receives_in_a_thread_and_its_logs_come_back(started):
    def reward(prompts, completions, completion_ids, target, trainer_state, log_extra, log_metric, **kwargs):
        log_extra("seen", [(prompts, completions, completion_ids, target, trainer_state, sorted(kwargs))] * 2)
        log_metric("main thread", threading.current_thread() is threading.main_thread())
        log_metric("torch", "torch" in sys.modules)
        return [0.0, 1.0]

    score = started(reward)(group(target=4, completion="hidden"))
    expected = (["p"] * 2, ["c[5, 6]", "c[5, 7]"], [[5, 6], [5, 7]], [4, 4], state(None), [])
    assert score.extra_columns == {"seen": [expected] * 2}
    assert score.metrics == [("main thread", 1.0), ("torch", 0.0)]
    assert score.rewards == [[0.0], [1.0]] and score.seconds >= 0


def test_what_is_defined_in_a_script_can_come_back(started):
    class Verdict:
        def __init__(self, word):
            self.word = word

    def reward(log_extra, **kwargs):
        log_extra("verdict", [Verdict("good"), Verdict("bad")])
        return [1.0, 0.0]

    score = started(reward)(group())
    assert [verdict.word for verdict in score.extra_columns["verdict"]] == ["good", "bad"]


def test_several_groups_are_scored_at_once(started, tmp_path):
    def reward(target, **kwargs):
        (tmp_path / target[0]).touch()
        while len(list(tmp_path.iterdir())) < 2:  # ends only if the other one runs at the same time
            time.sleep(0.01)
        return [1.0, 1.0]

    scores = started(reward, workers=2).score_all([group(target="a"), group(target="b")])
    assert [score.rewards for score in scores] == [[[1.0], [1.0]]] * 2


def test_more_groups_than_workers_and_messages_larger_than_a_socket_holds(started):
    workers = started(lambda target, **kwargs: [len(text) for text in target], workers=2)
    scores = workers.score_all([group(target="x" * (i * 100_000)) for i in range(10)])
    assert [score.rewards[0][0] for score in scores] == [i * 100_000 for i in range(10)]


def test_what_functions_print_is_shown_and_does_not_block_them(started, capfd):
    workers = started(lambda **kwargs: [print("x" * 1000) or 0.0 for _ in range(200)][:2])
    workers(group())
    workers(group())
    assert capfd.readouterr().out.count("x") >= 200_000


@pytest.fixture
def sends():
    """pool -> sizes of the messages that its worker is sent from now on."""

    def of(pool):
        channel = pool._idle[0].process.channel
        send, sent = channel.send, []
        channel.send = lambda message: (sent.append(len(pickle.dumps(message))), send(message))
        return sent

    return of


def with_log(log):
    return lambda group: SimpleNamespace(global_step=len(log), log_history=list(log))


def test_the_log_is_sent_to_a_worker_once_and_equals_the_trainers(started, sends):
    log = [{f"metric{i}": i * step / 7 for i in range(30)} for step in range(2000)]

    def reads(trainer_state, log_metric, **kwargs):
        entries = trainer_state.log_history
        log_metric("length", len(entries))
        log_metric("sum", sum(map(sum, map(dict.values, entries))))
        log_metric("step", trainer_state.global_step)
        entries.clear()
        return [0.0, 0.0]

    workers = started(reads, state=with_log(log))
    sent = sends(workers)
    for change in (lambda: None, lambda: None, lambda: log.append({"loss": 0.5}), lambda: log[7].update(late=99.0)):
        change()
        total = sum(sum(entry.values()) for entry in log)
        logged = dict(workers(group()).metrics)
        assert logged == {"length": len(log), "sum": total, "step": len(log)}
    groups, (first, second, third, fourth) = sent[::2], sent[1::2]
    assert max(groups) < 2_000
    assert first > 500_000 and second < 2_000 and third < second + 200 and fourth > 500_000


def test_a_log_that_no_function_reads_is_neither_sent_nor_kept(started, sends):
    log = [{f"metric{i}": i * step / 7 for i in range(30)} for step in range(2000)]
    workers = started(lambda trainer_state, **kwargs: [float(trainer_state.global_step)] * 2, state=with_log(log))
    sent = sends(workers)
    assert [workers(group()).rewards[0] for _ in range(3)] == [[2000.0]] * 3
    assert len(sent) == 3 and max(sent) < 2_000 and workers._log._entries == []


def test_a_thread_a_copy_and_a_pickle_of_the_state_have_its_log(started):
    def reads(trainer_state, **kwargs):
        with ThreadPoolExecutor(2) as pool:
            threads = [pool.submit(lambda: len(trainer_state.log_history)).result() for _ in range(2)]
        copies = copy.copy(trainer_state), copy.deepcopy(trainer_state), pickle.loads(pickle.dumps(trainer_state))
        assert threads == [1, 1] and {"log_history", "global_step"} == vars(trainer_state).keys()
        return [float(sum(made.log_history == [{"loss": 1.0, "step": 2}] for made in copies))] * 2

    assert started(reads)(group()).rewards[0] == [3.0]


def test_the_log_of_a_group_that_was_scored_cannot_be_read_any_more(started):
    kept = []

    def keeps(trainer_state, **kwargs):
        kept.append(trainer_state)
        return [float(len(kept[0].log_history))] * 2

    def late(trainer_state, **kwargs):
        kept.append(trainer_state)
        return [0.0 if len(kept) == 1 else float(len(kept[0].log_history))] * 2

    workers = started(keeps)
    assert [workers(group()).rewards[0] for _ in range(2)] == [[1.0], [1.0]]
    workers = started(late)
    workers(group())
    with pytest.raises(RewardError, match="log_history was read after the reward functions had returned"):
        workers(group())


def test_a_log_that_cannot_be_sent_is_an_error_at_once(started):
    log = [{"loss": threading.Lock()}]
    workers = started(lambda trainer_state, **kwargs: [float(len(trainer_state.log_history))] * 2, state=with_log(log))
    with pytest.raises(RewardError, match="The trainer's log_history cannot be sent to a reward worker"):
        workers(group())


SCRIPT = """
from concurrent.futures import ProcessPoolExecutor
from tests.rewards.test_worker_pool import completions, group, state
from trl_a3po.rewards.worker_pool import RewardWorkers

OFFSET = 3

def check(number):
    return float(number + OFFSET)

class Checks:
    def __call__(self, completions, **kwargs):
        with ProcessPoolExecutor(1) as pool:
            return list(pool.map(check, range(len(completions))))

if __name__ == "__main__":
    workers = RewardWorkers([None, Checks()], ["none", "checks"], completions, state, workers=1)
    workers.start()
    print([row[1] for row in workers(group()).rewards])
    workers.close()
"""


def test_a_function_of_a_script_may_hand_the_scripts_functions_to_processes_of_its_own(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    environment = {**os.environ, "PYTHONPATH": os.getcwd()}
    command = [sys.executable, tmp_path / "script.py"]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
    assert ran.stdout.strip() == "[3.0, 4.0]", ran.stderr


# --- what goes wrong ----------------------------------------------------------------------------------------------


def test_what_a_function_raises_is_an_error_with_the_workers_traceback(started):
    workers = started(by_target([]))
    with pytest.raises(RewardError, match="'reward0' raised KeyError") as error:
        workers(group(target="raise"))
    assert isinstance(error.value.__cause__, RewardTraceback)
    assert " in reward\nKeyError: 'gold'" in str(error.value.__cause__)
    assert workers(group(target="reward")).rewards[0][0] == 2  # by the same worker


def test_a_function_that_exits_is_an_error_and_its_worker_goes_on(started):
    workers = started(by_target([]))
    with pytest.raises(RewardError, match="'reward0' raised SystemExit\\('enough'\\)"):
        workers(group(target="exit"))
    assert workers(group(target="reward")).rewards[0][0] == 2


def test_an_async_function_with_a_cancelled_task_is_named(started):
    async def judge(**kwargs):
        task = asyncio.create_task(asyncio.sleep(30))
        task.cancel()
        await task

    with pytest.raises(RewardError, match="'reward0' raised CancelledError"):
        started(judge)(group())


def test_a_wrong_number_of_rewards_is_refused_as_in_a_thread(started):
    with pytest.raises(RewardError, match="returned 1 rewards for a group of 2"):
        started(lambda **kwargs: [1.0])(group())


def test_a_function_that_cannot_be_pickled_is_named_with_the_way_out(started):
    lock = threading.Lock()

    def locked(**kwargs):
        with lock:
            return [0.0, 0.0]

    with pytest.raises(RewardError, match=r"'reward1' cannot be sent to a reward worker: .*lock.*reward_workers=0"):
        started(lambda **kwargs: [0.0, 0.0], locked)


def test_a_function_that_cannot_be_loaded_is_an_error_and_not_a_rejection(started):
    class Unloadable:
        def __reduce__(self):
            return (int, ("not a number",))

        def __call__(self, **kwargs):
            return [0.0, 0.0]

    with pytest.raises(RewardError, match="cannot be loaded in a reward worker: ValueError") as error:
        started(Unloadable())(group())
    assert "reward_workers=0" in str(error.value) and isinstance(error.value.__cause__, RewardTraceback)


def test_a_row_that_cannot_be_pickled_is_named(started):
    with pytest.raises(RewardError, match="Prompt 7 cannot be sent"):
        started(lambda **kwargs: [0.0, 0.0])(group(7, target=threading.Lock()))


def test_a_hanging_function_is_killed_its_group_rejected_and_the_next_scored(started, caplog):
    workers = started(by_target([]), timeout=2.0)
    hung = workers(group(target="reward")).rewards[1][0]
    with caplog.at_level(logging.WARNING):
        verdict = workers(group(7, target="hang"))
    assert verdict == Rejection("reward timeout in 'reward0'")
    assert is_reaped(int(hung)) and (workers.timeouts, workers.crashes) == (1, 0)
    assert "Prompt 7: reward timeout in 'reward0'" in caplog.text
    assert " in reward\n" in caplog.text  # where it hung
    again = workers(group(target="reward"))
    assert again.rewards[0][0] == 1 and again.rewards[1][0] != hung  # another worker, with the functions as at first


def test_a_worker_that_holds_its_interpreter_lock_is_killed_too_and_says_where(started, caplog):
    def freezes(**kwargs):
        return max(itertools.repeat(1))

    workers = started(freezes, timeout=0.5)
    assert workers(group()) == Rejection("reward timeout in 'reward0'") and workers.timeouts == 1
    assert " in freezes\n" in caplog.text


def test_a_worker_that_ignores_signals_is_killed_too(started):
    def stubborn(**kwargs):
        import signal

        signal.signal(signal.SIGABRT, signal.SIG_IGN)
        time.sleep(LONG)

    assert isinstance(started(stubborn, timeout=0.5)(group()), Rejection)


def test_a_function_that_kills_its_process_has_its_group_rejected_and_the_next_scored(started):
    workers = started(by_target([]))
    assert workers(group(target="die")) == Rejection("reward worker died in 'reward0' (exit code 3)")
    assert (workers.timeouts, workers.crashes) == (0, 1)
    assert workers(group(target="reward")).rewards[0][0] == 1


def test_the_missing_rewards_are_set_where_a_value_is_configured_and_no_others(started):
    async def hangs(**kwargs):
        time.sleep(LONG)

    workers = started(hangs, lambda **kwargs: [1.0, None], None, by_target([]), timeout=2.0, on_timeout=-0.5)
    score = workers(group(target="reward"))
    assert isinstance(score, Score) and workers.timeouts == 1
    assert [row[0] for row in score.rewards] == [-0.5, -0.5]
    assert score.rewards[0][1] == 1.0 and math.isnan(score.rewards[1][1])
    assert all(math.isnan(row[2]) for row in score.rewards)
    assert score.rewards[0][3] == 1.0 and score.seconds >= 2.0
    dead = workers(group(target="die"))
    assert [(row[0], row[3]) for row in dead.rewards] == [(-0.5, -0.5)] * 2 and workers.crashes == 1


def test_the_time_to_load_the_functions_is_not_the_functions_time(started):
    class Slow:
        def __reduce__(self):
            return (_slow, ())

    assert isinstance(started(Slow(), timeout=2.0)(group()), Score)


def _slow():
    time.sleep(2.5)
    return lambda **kwargs: [0.0, 0.0]


def test_the_start_of_a_worker_is_no_stall_of_an_evaluation(started, monkeypatch, tmp_path):
    class Gated:
        def __reduce__(self):
            return (_when_there_is, (tmp_path / "gate",))

    def passes():
        if workers.starting() and not (tmp_path / "gate").exists():
            now[0] += 100.0
            if now[0] >= 300.0:
                (tmp_path / "gate").touch()

    monkeypatch.setattr(scorer, "WHILE_WAITING_SECONDS", 0.01)
    now = [0.0]
    workers = started(Gated(), stall_timeout=60.0, clock=lambda: now[0])
    assert workers.score_all([group()], passes)[0].rewards == [[0.0], [0.0]]
    assert now[0] >= 300.0 and not workers.starting()


def _when_there_is(gate):
    while not gate.exists():
        time.sleep(0.01)
    return lambda **kwargs: [0.0, 0.0]


def test_score_all_gives_up_on_a_hanging_group_and_names_the_setting(started):
    workers = started(by_target([]), stall_timeout=1.0)
    workers(group(target="reward"))  # now it has started
    with pytest.raises(StallError, match="set a reward_timeout"):
        workers.score_all([group(target="hang")])


# --- the end ------------------------------------------------------------------------------------------------------


def test_close_ends_idle_and_busy_workers_and_those_who_wait(started):
    workers = started(by_target([]), workers=2)
    first = workers(group(target="reward")).rewards[1][0]
    with ThreadPoolExecutor(3) as threads:
        waiting = [threads.submit(workers, group(target="hang")) for _ in range(3)]
        until(lambda: len(workers._busy) == 2)
        processes = [worker.process.pid for worker in workers._busy]
        workers.close()
        for future in waiting:
            with pytest.raises(RewardError, match="closed"):
                future.result(30)
    assert int(first) in processes and all(map(is_reaped, processes))
    workers.close()
    with pytest.raises(RewardError, match="closed"):
        workers(group(target="reward"))


def test_close_ends_workers_that_are_idle_or_still_loading(started):
    workers = started(by_target([]), workers=2)
    processes = [worker.process.pid for worker in workers._idle]
    workers(group(target="reward"))
    workers.close()
    assert len(processes) == 2 and all(map(is_reaped, processes))
