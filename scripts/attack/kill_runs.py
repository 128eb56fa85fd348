"""Kill a training run with SIGKILL at random moments, resume it, and compare it with one that was left alone.

    python scripts/attack/kill_runs.py --kills 20 --seed 0

Trains recipes/transformer.py, made tiny, with a checkpoint every five steps. Each story kills the run up to four times,
at a random step and up to 0.3 seconds after it, so often within a save; then it lets it end. Exits with 1 if the
metrics, every byte of them, or the exported weights are not those of the uninterrupted run, or if a resumed run fails
or hangs.
"""

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
KILLS_PER_STORY = 4
SECONDS = 300
SIZES = {"embed": 16, "layers": 1, "heads": 2, "mlp-dim": 16, "seq-len": 16, "batch-size": 4, "warmup-steps": 10}
RESULTS = ("metrics.jsonl", "export/model.safetensors")


def start(folder: Path, out: Path, steps: int) -> subprocess.Popen[bytes]:
    """Start the recipe, to resume what is in `out`, with its output in a file beside."""
    flags = [f"--{name}={value}" for name, value in (SIZES | {"steps": steps, "eval-every": 5}).items()]
    words = [
        sys.executable,
        "recipes/transformer.py",
        "--data",
        str(folder / "text"),
        *flags,
        "--resume",
        f"--out={out}",
    ]
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "XDG_CACHE_HOME": str(folder / "cache")}
    environment |= {"JAX_COMPILATION_CACHE_DIR": str(folder / "programs"), "PYTHONPATH": str(ROOT)}
    with out.with_suffix(".log").open("ab") as log:
        return subprocess.Popen(words, cwd=ROOT, env=environment, stdout=log, stderr=log)


def finish(process: subprocess.Popen[bytes], out: Path) -> str | None:
    """Wait for the end of a run; return its last line if it failed, or that it hangs."""
    try:
        status = process.wait(SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        return f"hangs after {SECONDS} seconds"
    return None if status == 0 else f"status {status}: {out.with_suffix('.log').read_text().splitlines()[-1]}"


def kill(process: subprocess.Popen[bytes], out: Path, steps: int, delay: float) -> bool:
    """Kill a run `delay` seconds after it has written its metrics of so many steps; False if it ends before."""
    end = time.monotonic() + SECONDS
    while process.poll() is None and count_steps(out) < steps and time.monotonic() < end:
        time.sleep(0.005)
    time.sleep(delay)
    process.send_signal(signal.SIGKILL)
    return process.wait() == -signal.SIGKILL


def read_results(out: Path) -> list[bytes]:
    return [(out / name).read_bytes() for name in RESULTS]


def count_steps(out: Path) -> int:
    try:
        return (out / "metrics.jsonl").read_bytes().count(b"\n")
    except FileNotFoundError:
        return 0


def main() -> int:
    """Print a line per story and a summary, and return 1 if a resumed run differs from the uninterrupted one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20, help="number of kills (default: 20)")
    parser.add_argument("--steps", type=int, default=150, help="steps of the run (default: 150)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the moments (default: 0)")
    flags = parser.parse_args()
    chance, different, done = random.Random(flags.seed), [], 0
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        (folder / "text").mkdir()
        text = "".join(f"{i} green bottles, hanging on the wall, {chance.random()}\n" for i in range(5000))
        (folder / "text" / "a.txt").write_text(text)
        alone = folder / "alone"
        if failure := finish(start(folder, alone, flags.steps), alone):
            print(f"the uninterrupted run: {failure}")
            return 1
        expected = read_results(alone)
        for story in range(-(-flags.kills // KILLS_PER_STORY)):
            out, at = folder / f"story{story}", []
            for _ in range(min(KILLS_PER_STORY, flags.kills - done)):
                goal = count_steps(out) + chance.randint(1, flags.steps // KILLS_PER_STORY)
                if kill(start(folder, out, flags.steps), out, goal, chance.uniform(0, 0.3)):
                    at.append(count_steps(out))
            done += len(at)
            outcome = finish(start(folder, out, flags.steps), out)
            outcome = outcome or ("equal" if read_results(out) == expected else "another result")
            different += [outcome] if outcome != "equal" else []
            print(
                f"story {story}: killed with {', '.join(map(str, at)) or 'no'} lines of metrics: {outcome}", flush=True
            )
    print(f"{done} kills; forbidden: {len(different)}")
    return 1 if different else 0


if __name__ == "__main__":
    sys.exit(main())
