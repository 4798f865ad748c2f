"""Directives of a script, read as sbatch and qsub read them."""

PREFIX = {"slurm": "#SBATCH ", "pbs": "#PBS "}


def directives(script: str, scheduler: str) -> list[list[str]]:
    """The words of every line of options; they end with the first command."""
    lines = script.splitlines()[1:]
    end = next(index for index, line in enumerate(lines) if not line.startswith("#"))
    assert not any(line.startswith(PREFIX[scheduler]) for line in lines[end:])
    assert all(line.startswith(PREFIX[scheduler]) for line in lines[:end])
    return [words(line.removeprefix(PREFIX[scheduler]), scheduler) for line in lines[:end]]


def words(line: str, scheduler: str) -> list[str]:
    """As src/sbatch/opt.c splits them, where a backslash escapes within quotes, too, and ``#``
    begins a comment; or make_argv in src/cmds/qsub.c, where both are letters."""
    found, word, quote, begun, letters = [], "", "", False, iter(line)
    for letter in letters:
        if letter == "\\" and scheduler == "slurm":
            word, begun = word + next(letters), True
        elif quote and letter == quote:
            quote = ""
        elif not quote and letter in "'\"":
            quote, begun = letter, True
        elif not quote and letter == "#" and scheduler == "slurm":
            break
        elif not quote and letter.isspace():
            if begun:
                found.append(word)
            word, begun = "", False
        else:
            word, begun = word + letter, True
    assert not quote, f"unmatched quote in {line!r}"
    return [*found, word] if begun else found
