"""Stand-ins of srun, scancel and scontrol: the name under which this file is called says which.

`srun` starts FAKE_TASKS processes with the variables that Slurm sets in a step, one per node of FAKE_NODES, and ends
all if one fails, as `--kill-on-bad-exit` asks. As the real one does, it kills its tasks when it gets SIGTERM itself.
`scancel --signal=TERM` signals the tasks. All append their words to FAKE_LOG.
"""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

LOG = Path(os.environ["FAKE_LOG"])
PIDS = LOG.with_suffix(".pids")


def main() -> int:
    name, words = Path(sys.argv[0]).name, sys.argv[1:]
    with LOG.open("a", encoding="utf-8") as file:
        print(name, *words, file=file)
    if name == "scancel":
        for pid in PIDS.read_text(encoding="utf-8").split():
            os.kill(int(pid), signal.SIGTERM)
    return run_tasks(words) if name == "srun" else 0


def run_tasks(words: list[str]) -> int:
    command = words[next(index for index, word in enumerate(words) if not word.startswith("-")) :]
    nodes, tasks = os.environ["FAKE_NODES"], int(os.environ["FAKE_TASKS"])
    processes = []

    def kill(*_):
        for process in processes:
            process.kill()

    signal.signal(signal.SIGTERM, kill)
    for index in range(tasks):
        place = {"SLURM_PROCID": index, "SLURM_NODEID": index, "SLURM_LOCALID": 0, "SLURM_STEP_ID": 0}
        place |= {"SLURM_NTASKS": tasks, "SLURM_STEP_NUM_TASKS": tasks, "SLURM_STEP_TASKS_PER_NODE": f"1(x{tasks})"}
        place |= {"SLURM_STEP_NODELIST": nodes}
        environment = os.environ | {name: str(value) for name, value in place.items()}
        processes.append(subprocess.Popen(command, env=environment))
    PIDS.write_text(" ".join(str(process.pid) for process in processes), encoding="utf-8")
    while any(process.poll() is None for process in processes):
        if any(process.returncode for process in processes):
            time.sleep(2)
            kill()
        time.sleep(0.05)
    return max(process.returncode % 256 for process in processes)


if __name__ == "__main__":
    sys.exit(main())
