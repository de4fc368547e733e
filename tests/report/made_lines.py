"""Lines of a timeline, written by hand."""


def start(**facts):
    settings = {"groups_per_batch": 2, "num_generations": 4, "max_staleness": 1, "schedule": "async"}
    return {"kind": "start", "time": 0.0, "run": "r", "version": 0, "resumed": False, **settings, **facts}


def span(kind, began, ended, **facts):
    return {"kind": kind, "began": began, "ended": ended, "version": 0, **facts}


def group(submitted, finished, scoring, scored, ended, outcome="trained"):
    times = {"submitted": submitted, "finished": finished, "scoring": scoring, "scored": scored, "ended": ended}
    return {"kind": "group", "prompt": 0, "outcome": outcome, **times}


def batch(at):
    """An optimizer step of ten seconds, after an evaluation."""
    return [
        span("evaluation", at - 10.0, at),
        span("publish", at, at + 1.0),
        span("take", at + 1.0, at + 5.0),  # sampled for two seconds, in line for one, scored in one
        group(at - 11.0, at - 8.0, at - 8.0, at - 7.0, at + 5.0),
        group(at, at + 3.0, at + 4.0, at + 5.0, at + 5.0),
        span("step", at, at + 10.0),
    ]


FIRST = [span("take", 0.0, 9.0), group(0.0, 9.0, 9.0, 9.0, 9.0), span("step", 0.0, 10.0)]
LINES = [*FIRST, *batch(20.0), *batch(40.0)]
