"""Whether the processes of a run, which may lie on several machines, mean one folder by one path.

Guarantees: asked and answered by all processes together; nothing is left in the folder; a run of one process asks
nothing.
"""

import socket
import time
import uuid
from pathlib import Path

from trl_a3po.distributed.team import Team

PATIENCE_SECONDS = 10.0  # for a network's file system to show a new file


def check_shared(team: Team, folder: Path) -> None:
    """Raise `ValueError`, in every process, unless all of them see what the main one writes into `folder`."""
    if team.size == 1:
        return
    token = team.lead(lambda: _leave_token(folder))
    places = team.gather((socket.gethostname(), str(folder.absolute()), _appears(folder / token)))
    team.lead(lambda: _judge(folder / token, places))


def _leave_token(folder: Path) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    token = f".trl_a3po_{uuid.uuid4().hex}"
    (folder / token).touch()
    return token


def _appears(path: Path) -> bool:
    until = time.monotonic() + PATIENCE_SECONDS
    while not path.exists():
        if time.monotonic() > until:
            return False
        time.sleep(0.2)
    return True


def _judge(token: Path, places: list[tuple[str, str, bool]]) -> None:
    token.unlink()
    main_host, main_path, _ = places[0]
    for rank, (host, path, sees) in enumerate(places):
        if not sees:
            raise ValueError(
                f"output_dir is {main_path} on {main_host}, where process 0 writes checkpoints, and process {rank} "
                f"looks for them in {path} on {host}, which is another folder: set output_dir to a folder that all "
                "machines share, or save_strategy='no'."
            )
