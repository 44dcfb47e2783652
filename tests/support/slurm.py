"""SLURM's commands, for jobs of one machine, which run one after another: stand-ins by the names of `NAMES`.

The first task of the first job is a process from its very beginning; all others are forked off the warm one that
listens at the address in the environment variable WARM.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

from support.process import Forked

NAMES = ("sbatch", "srun", "sacct")


def installed(folder: Path) -> str:
    """A PATH on which they come first; they are written to this folder."""
    folder.mkdir()
    for name in NAMES:
        command = folder / name
        command.write_text(f'#!/bin/sh\nexec {sys.executable} {Path(__file__).resolve()} {name} "$@"\n')
        command.chmod(0o755)
    return f"{folder}{os.pathsep}{os.environ['PATH']}"


def sbatch(*arguments: str) -> None:
    """Say a number, and run the script in the background: once, or once for each job of its array."""
    jobs = subprocess.Popen(
        [sys.executable, __file__, "jobs", arguments[-1]],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    print(f"Submitted batch job {jobs.pid}")


def jobs(script: str) -> None:
    """The jobs of a script; their number is that of this process."""
    asked = dict(re.findall(r"^#SBATCH --([\w-]+)=(\S+)", Path(script).read_text(), re.MULTILINE))
    tasks, number = asked["ntasks-per-node"], str(os.getpid())
    job = os.environ | {"SLURM_JOB_ID": number, "SLURM_JOB_NAME": asked["job-name"], "SLURM_NNODES": asked["nodes"]}
    job |= {"SLURM_NTASKS": tasks, "SLURM_NTASKS_PER_NODE": tasks}
    last = re.match(r"0-(\d+)", asked.get("array", ""))
    for index in range(int(last[1]) + 1 if last else 1):
        array = {"SLURM_ARRAY_JOB_ID": number, "SLURM_ARRAY_TASK_ID": str(index)} if last else {}
        subprocess.run(["bash", script], env=job | array, check=False)


def srun(*arguments: str) -> None:
    """The command as each task of the job."""
    command = arguments[arguments.index(sys.executable) :]
    module = command[command.index("-m") + 1 :]
    tasks: list[Forked | subprocess.Popen[bytes]] = []
    for rank in map(str, range(int(os.environ["SLURM_NTASKS"]))):
        task = os.environ | {"SLURM_PROCID": rank, "SLURM_LOCALID": rank, "SLURM_NODEID": "0"}
        if rank == os.environ["SLURM_ARRAY_TASK_ID"] == "0":
            tasks.append(subprocess.Popen(command, env=task))
        else:
            tasks.append(Forked(os.environ["WARM"], module, Path.cwd(), task, sys.stdout))
    sys.exit(max(task.wait() for task in tasks))


def sacct(*arguments: str) -> None:
    """Nothing is known of any job: who asks looks for what it has written."""
    print("JobID|State|NodeList")


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
