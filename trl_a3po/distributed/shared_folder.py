"""Check that the processes of a run, which may be on several machines, see the same folder at the same path.

Guarantees: all processes check together and get the same result; no file is left in the folder; a run of one process
skips the check.
"""

import socket
import time
import uuid
from pathlib import Path

from trl_a3po.distributed.team import Team

VISIBLE_TIMEOUT = 10.0  # seconds for a network file system to show a new file


def check_shared(team: Team, folder: Path) -> None:
    """Raise `ValueError`, in every process, unless all of them see a file that the main one writes into `folder`."""
    if team.size == 1:
        return
    name = team.run_on_main(lambda: _write_marker(folder))
    sightings = team.gather((socket.gethostname(), str(folder.absolute()), _appears(folder / name)))
    team.run_on_main(lambda: _check_sightings(folder / name, sightings or []))


def _write_marker(folder: Path) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    name = f".trl_a3po_{uuid.uuid4().hex}"
    (folder / name).touch()
    return name


def _appears(path: Path) -> bool:
    deadline = time.monotonic() + VISIBLE_TIMEOUT
    while not path.exists():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.2)
    return True


def _check_sightings(marker: Path, sightings: list[tuple[str, str, bool]]) -> None:
    """`sightings`: host, path and whether the marker appeared, by rank."""
    marker.unlink()
    main_host, main_path, _ = sightings[0]
    for rank, (host, path, appeared) in enumerate(sightings):
        if not appeared:
            raise ValueError(
                f"output_dir is {main_path} on {main_host}, where process 0 writes checkpoints, but process {rank} "
                f"looks for them in {path} on {host}, which is another folder: set output_dir to a folder that all "
                "machines share, or set save_strategy='no'."
            )
