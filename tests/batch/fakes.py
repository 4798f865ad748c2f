"""Pretended commands of a batch system."""

from pathlib import Path

DATA = Path(__file__).parents[1] / "data" / "scheduler"

# Answers with the files that Fake.answer wrote, and keeps its arguments and environment.
_FAKE = """#!/bin/bash
here=$(dirname "$0")
name=$(basename "$0")
printf '%s\\0' "$@" >>"$here/$name.argv"
printf '\\n' >>"$here/$name.argv"
env -0 >"$here/$name.env"
[[ -e $here/$name.hang ]] && exec sleep 60
cat "$here/$name.stdout"
cat "$here/$name.stderr" >&2
exit "$(cat "$here/$name.rc")"
"""


COMMANDS = {
    "slurm": ("sbatch", "squeue", "sacct", "scancel", "sinfo", "scontrol"),
    "pbs": ("qsub", "qstat", "qselect", "qdel", "pbsnodes"),
}


class FakeCommands:
    """The commands of a batch system as scripts in a new folder; at first they say nothing."""

    def __init__(self, folder, system):
        folder.mkdir()
        self.folder, self.names, self._samples = folder, COMMANDS[system], DATA / system
        for name in self.names:
            self.answer(name)

    def answer(self, command, stdout="", stderr="", rc=0):
        for stream, text in (("stdout", stdout), ("stderr", stderr), ("rc", str(rc))):
            (self.folder / f"{command}.{stream}").write_text(text)
        (self.folder / command).write_text(_FAKE)
        (self.folder / command).chmod(0o755)

    def replay(self, command, sample):
        """Answer with a recorded output: a first line ``$ command``, a last line ``[rc=N]``."""
        _, *lines, last = (self._samples / sample).read_text().splitlines()
        rc = int(last.removeprefix("[rc=").removesuffix("]"))
        text = "".join(f"{line}\n" for line in lines)
        on_stderr = rc != 0 or "test-only" in sample or sample.startswith("sbatch-bad")
        self.answer(command, **{"stderr" if on_stderr else "stdout": text}, rc=rc)

    def hang(self, command):
        self.answer(command)
        (self.folder / f"{command}.hang").touch()

    def calls(self, command):
        path = self.folder / f"{command}.argv"
        lines = path.read_text().split("\n")[:-1] if path.exists() else []
        return [line.split("\0")[:-1] for line in lines]

    def environment(self, command):
        items = (self.folder / f"{command}.env").read_text().split("\0")[:-1]
        return dict(item.split("=", 1) for item in items)
