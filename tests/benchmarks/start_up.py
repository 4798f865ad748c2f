"""Start of commands, against an interpreter that imports only typer and rich."""

import statistics
import subprocess
import sys
import tempfile
import time

REPEATS = 7
PYTHON = sys.executable
COMMANDS = {
    "python -c 'import typer, rich'": [PYTHON, "-c", "import typer, rich"],
    "pipectl --help": [PYTHON, "-m", "pipectl", "--help"],
    "pipectl status": [PYTHON, "-m", "pipectl", "status"],
}


def seconds(command: list[str], directory: str) -> float:
    """Median wall time of one command, after one run to warm the caches."""
    times = []
    for _ in range(REPEATS + 1):
        start = time.perf_counter()
        subprocess.run(command, cwd=directory, stdout=subprocess.DEVNULL, check=True)
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:])


def main() -> None:
    """Print one line per command."""
    with tempfile.TemporaryDirectory() as directory:
        for name, command in COMMANDS.items():
            print(f"{seconds(command, directory) * 1e3:7.0f} ms  {name}")


if __name__ == "__main__":
    main()
