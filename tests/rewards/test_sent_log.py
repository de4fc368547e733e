"""What is sent of the log, against sending all of it."""

import random

from trl_a3po.rewards.sent_log import ReceivedLog, SentLog


def test_each_worker_has_the_log_of_its_group_whatever_happens_to_it():
    draw = random.Random(0)
    log, sent = [], SentLog()
    known, received = [[] for _ in range(3)], [ReceivedLog() for _ in range(3)]
    for _ in range(500):
        match draw.choice(["log", "log", "log", "edit", "replace", "shorten"]):
            case "log":
                log.append({"step": draw.randrange(9), "nan": float("nan")})
            case "edit" if log:
                draw.choice(log)["late"] = draw.random()
            case "replace" if log:
                log[draw.randrange(len(log))] = {"step": draw.randrange(9)}
            case "shorten":
                log = log[: -draw.randrange(1, 3)]
        worker = draw.randrange(3)
        shown = received[worker].add(*sent.addition(log, known[worker]))
        assert shown == log
        for entry in shown:  # a function changes what it received
            entry.clear()
        shown.clear()


def test_an_entry_is_sent_once():
    log, sent, known = [{"step": step} for step in range(5)], SentLog(), []
    assert sent.addition(log, known) == (0, log)
    assert sent.addition(log, known) == (5, [])
    log.append({"step": 5})
    assert sent.addition(log, []) == (0, log)  # another worker
    assert sent.addition(log, known) == (5, [{"step": 5}])
