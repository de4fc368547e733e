"""Which checkpoint a run resumes from.

Guarantees: it is a valid one, or a `ValueError` says what is wrong with each checkpoint that was found.
"""

import logging
from pathlib import Path

from trl_a3po.checkpoints import checkpoint

logger = logging.getLogger(__name__)


def choose_checkpoint(resume_from_checkpoint: bool | str, output_dir: str) -> Path:
    """The folder to resume from: for `True`, the newest valid checkpoint in `output_dir`, and else the given folder,
    in which `~` is the home folder.

    A given folder may also be a checkpoint of `GRPOTrainer`.

    Raises:
        ValueError: there is no valid checkpoint, or the given folder is not one.
    """
    if resume_from_checkpoint is True:
        return newest_valid(Path(output_dir))
    folder = Path(str(resume_from_checkpoint)).expanduser()
    problem = checkpoint.why_invalid(folder) or checkpoint.why_damaged(folder)
    plain = folder.is_dir() and not checkpoint.is_ours(folder) and (folder / "trainer_state.json").is_file()
    if problem is not None and not plain:
        raise ValueError(
            f"resume_from_checkpoint={str(folder)!r} {problem}: give the path of a valid checkpoint, or True for the "
            "newest valid checkpoint in output_dir."
        )
    return folder


def newest_valid(output_dir: Path) -> Path:
    """The valid checkpoint in `output_dir` that was written last, according to the markers.

    Warnings name the checkpoints that are not valid, and those of higher steps, which another run has written, or this
    run before it went back to an earlier checkpoint.

    Raises:
        ValueError: there is no valid checkpoint; the message says what is wrong with each that was found.
    """
    found = {folder: checkpoint.why_invalid(folder) for folder in reversed(checkpoint.checkpoints(output_dir))}
    problems = [f"{folder} {problem}" for folder, problem in found.items() if problem is not None]
    valid = [folder for folder, problem in found.items() if problem is None]
    valid.sort(key=lambda folder: (checkpoint.written_at(folder), checkpoint.step_of(folder)))
    while valid and (damage := checkpoint.why_damaged(valid[-1])) is not None:
        problems.append(f"{valid.pop()} {damage}")
    if not valid:
        raise ValueError(
            f"resume_from_checkpoint=True finds no valid checkpoint in output_dir={str(output_dir)!r}: "
            f"{'; '.join(problems) or 'there is no checkpoint at all'}. Leave resume_from_checkpoint out to start "
            "from the beginning, or give the path of a checkpoint."
        )
    newest = valid[-1]
    for problem in problems:
        logger.warning("Not resuming from a checkpoint that is not valid: %s.", problem)
    for other in sorted(valid, key=checkpoint.step_of, reverse=True):
        if checkpoint.step_of(other) > checkpoint.step_of(newest):
            same_run = checkpoint.run_of(other) == checkpoint.run_of(newest)
            logger.warning(
                "Not resuming from %s, which was written before %s, by %s: give its path to go on from it.",
                other,
                newest.name,
                "this run before it went back" if same_run else "another run",
            )
    return newest


def warn_of_earlier_runs(output_dir: str) -> None:
    """Warn that a run which starts from the beginning shares `output_dir` with checkpoints of earlier runs."""
    folders = checkpoint.checkpoints(Path(output_dir))
    found = [folder.name for folder in folders if checkpoint.why_invalid(folder) is None]
    if found:
        logger.warning(
            "output_dir=%r holds %s of an earlier run, and this run starts from the beginning, because "
            "resume_from_checkpoint is not set. Until this run has saved a checkpoint of its own, "
            "resume_from_checkpoint=True goes on with the earlier run: set another output_dir to keep the two apart.",
            output_dir,
            ", ".join(found),
        )
