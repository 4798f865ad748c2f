"""Run directories of others hold whatever they like: looking at them harms nobody.

Tests that need a second user run as root alone; what the looking user does is done by a process of
its own, once as root and once as an ordinary user.
"""

import codecs
import errno
import io
import json
import os
import pickle
import pkgutil
import shutil
import signal
import stat
import sys
import tempfile
from contextlib import redirect_stderr, redirect_stdout
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import pytest

import pipectl.batch
import pipectl.cli
import pipectl.jobs
from pipectl.cli import main
from pipectl.errors import UsageError
from pipectl.files import (
    fault_of_owner,
    is_there,
    make_directory_of,
    open_regular,
    read_limited,
    write_text,
)
from pipectl.jobs.output import plan_path
from pipectl.runs import (
    Record,
    RunDirectory,
    SweepDirectory,
    find,
    list_runs,
    list_sweeps,
    sweep_of,
)

pytestmark = pytest.mark.slow

ROOT, NOBODY, MALLORY = 0, 65534, 12345
PATIENCE_S = 60
LATE = 1.7e9


def as_user(user, act):
    """What ``act`` returns, or raises, in a process of that user; one that hangs is killed."""
    sys.stdout.flush()
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        signal.alarm(PATIENCE_S)
        try:
            if user != os.geteuid():
                os.setgroups([])
                os.setresgid(user, user, user)
                os.setresuid(user, user, user)
            answer = (True, act())
        except BaseException as error:
            answer = (False, error)
        os.write(writer, pickle.dumps(answer))
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as stream:
        content = stream.read()
    assert os.waitpid(child, 0)[1] == 0, "it hung"
    good, answer = pickle.loads(content)
    if not good:
        raise answer
    return answer


def command(*arguments):
    def act():
        out, err = io.StringIO(), io.StringIO()
        with redirect_stdout(out), redirect_stderr(err):
            code = main(list(arguments))
        return SimpleNamespace(code=code, out=out.getvalue(), err=err.getvalue())

    return act


@pytest.fixture(scope="module", autouse=True)
def everything_loaded():
    """Ordinary users may not read this interpreter's library."""
    for package in (pipectl.batch, pipectl.cli, pipectl.jobs):
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            import_module(module.name)
    import_module("pipectl.runtime.checkpoint.export")
    for encoding in ("ascii", "utf-8-sig"):
        codecs.lookup(encoding)


@pytest.fixture(params=[ROOT, NOBODY], ids=["root", "nobody"])
def place(request, monkeypatch):
    """A directory of each of two users."""
    if os.geteuid() != ROOT:
        pytest.skip("only root has other users at hand")
    base = Path(tempfile.mkdtemp(prefix="pipectl-"))
    base.chmod(0o755)
    us, mine, theirs = request.param, base / "mine", base / "theirs"
    for path, user in ((mine, us), (theirs, MALLORY)):
        path.mkdir()
        os.chown(path, user, user)
    as_user(us, lambda: (mine / ".bashrc").write_text("# mine\n"))
    monkeypatch.chdir(mine)
    monkeypatch.setenv("HOME", str(mine))
    monkeypatch.setenv("PATH", "/bin:/usr/bin")
    yield SimpleNamespace(us=us, mine=mine, theirs=theirs)
    shutil.rmtree(base)


def make_run(base, **fields):
    run = RunDirectory.create(base, "demo", LATE)
    record = Record("demo", "local", f"{run.name} tag", LATE, ranks=2, nodes=1, steps=9)
    record.with_state(LATE, "submitted", job_id="999999.1@elsewhere").save(run.record)
    if fields:
        run.record.write_text(json.dumps({**json.loads(run.record.read_text()), **fields}))
    return run


def their_run(place, spoil=lambda run: None):
    """A run of the other user's that everybody may read."""

    def make():
        run = make_run(place.theirs)
        spoil(run)
        for path in (place.theirs, *place.theirs.rglob("*")):
            if not path.is_symlink() and (path.is_dir() or path.is_file()):
                path.chmod(path.stat().st_mode | (0o055 if path.is_dir() else 0o044))
        return run

    return as_user(MALLORY, make)


def state_of(*places):
    """Everything that is there, with what a write would change."""
    found = {}
    for path in (each for place in places for each in (place, *place.rglob("*"))):
        known = path.lstat()
        is_short = stat.S_ISREG(known.st_mode) and known.st_size < 10**5
        content = path.read_bytes() if is_short else None
        found[str(path)] = (known.st_mode, known.st_uid, known.st_mtime_ns, content)
    return found


JOB = """\
version: 1
name: demo
model: {factory: "MODEL:build"}
loss: {factory: "torch.nn:MSELoss"}
data: {factory: "MODEL:data"}
training: {steps: 4, batch_size: 8}
resources: {nodes: 1, tasks_per_node: 2}
site_defaults: false
"""


@pytest.fixture
def code(place):
    """A module with the names of the job, which makes a directory when it runs."""
    return f"import os\nos.mkdir({str(place.mine / 'ran')!r})\nbuild = data = None\n"


LOOKING = [
    ("status", "-d", "theirs"),
    ("status", "-d", "theirs", "--json"),
    ("status", "last", "-d", "theirs"),
    ("logs", "last", "-d", "theirs"),
    ("logs", "last", "--script", "-d", "theirs"),
    ("report", "last", "-d", "theirs", "-o", "/dev/null"),
    ("report", "last", "-d", "theirs"),
    ("export", "last", "-d", "theirs", "-o", "w"),
]
SPOIL = {
    "links to mine": lambda path, mine: path.symlink_to(mine / ".bashrc"),
    "pipes": lambda path, _: os.mkfifo(path),
    "devices": lambda path, _: path.symlink_to("/dev/zero"),
    "directories": lambda path, _: path.mkdir(),
    "huge files": lambda path, _: path.open("w").truncate(2**40),  # holes take no space
    "deep files": lambda path, _: path.write_text("[" * 10**6),
}


SHARD = {"file": "rank-0000.safetensors", "bytes": 0, "sha256": "0", "names": ["w"]}
MANIFEST = {"version": 1, "step": 4, "micro_batch_size": 1, "updates": 4, "shards": [SHARD]}


@pytest.mark.parametrize("kind", SPOIL)
def test_looking_at_runs_of_others_and_exporting_their_weights_writes_and_runs_nothing_and_ends(
    place, code, kind
):
    """Whatever is in place of the files that commands read, or may write."""

    def spoil(run):
        base, checkpoint = run.path.parent, run.checkpoints / "step-000004"
        (base / ".cache").mkdir()
        (run.path / "model.py").write_text(code)
        run.job.write_text(JOB.replace("MODEL", str(run.path / "model.py")))
        checkpoint.mkdir()
        manifest = {**MANIFEST, "training": [], "aliases": {}}
        (checkpoint / "manifest.json").write_text(json.dumps(manifest))
        logs = [run.job_log, run.logs / "late-1-0.log"]
        for path in (
            run.lock, run.start.exit_code, run.start.heartbeat, run.start.resubmitted, run.metrics,
            run.script, run.plan, run.profile, run.start.begun, run.start.error_of(0),
            run.trace / "step-000001.json",
            base / ".cache/readings.cache", base / "demo.profile.json", checkpoint / SHARD["file"],
            *(logs if "files" not in kind else []),
        ):  # fmt: skip
            path.unlink(missing_ok=True)
            SPOIL[kind](path, place.mine)
        if kind == "links to mine":  # a search for its job would write to the record
            record = {**json.loads(run.record.read_text()), "job_id": None}
            run.record.write_text(json.dumps(record))

    their_run(place, spoil)
    before = state_of(place.mine, place.theirs)
    for arguments in LOOKING:
        words = [str(place.theirs) if word == "theirs" else word for word in arguments]
        found = as_user(place.us, command(*words))
        assert "fault of pipectl" not in found.err, words
        assert found.code == 3 or "export" not in words, found
    assert state_of(place.mine, place.theirs) == before


def test_runs_of_others_and_ours_behind_their_link_are_not_changed(place):
    """A record could name a process or job of ours, and the files could be links."""
    run = their_run(place)
    mine = as_user(place.us, lambda: make_run(place.mine, state="submitting", job_id=None))
    link = place.theirs / f"{mine.name}-2"
    as_user(MALLORY, lambda: link.symlink_to(mine.path))
    before = state_of(place.mine, place.theirs)
    for path in (run.path, link):
        for words in (("cancel",), ("resume",), ("resume", "--force")):
            found = as_user(place.us, command(*words, path.name, "-d", str(place.theirs)))
            assert found.code == UsageError.exit_code
            assert f"{path}: belongs to the user {MALLORY}" in found.err or path == link
    assert as_user(place.us, command("status", "-d", str(place.theirs))).code == 0
    assert state_of(place.mine, place.theirs) == before


def test_a_directory_into_which_others_can_write_is_not_ours(place):
    run = as_user(place.us, lambda: make_run(place.mine))
    os.chown(run.path, place.us, MALLORY)
    for mode, who in ((0o777, "everybody"), (0o770, f"the group {MALLORY}")):
        run.path.chmod(mode)
        assert as_user(place.us, lambda: fault_of_owner(run.path)) == f"can be changed by {who}"
        found = as_user(place.us, command("cancel", "last", "-d", str(place.mine)))
        assert found.code == UsageError.exit_code
        assert f"chmod go-w {run.path}" in found.err


@pytest.mark.parametrize("through_ours", [False, True])
@pytest.mark.parametrize("kind", ["link", "link to a directory", "pipe", "pipe with a reader"])
def test_nothing_is_written_through_links_and_pipes_of_others(place, kind, through_ours):
    """In a directory that everybody may write to, also where a link of ours leads there. To a pipe
    that nobody reads, a writer would wait."""
    place.theirs.chmod(0o1777)
    if through_ours:
        os.chown(place.theirs, ROOT, ROOT)
    target, entry, path = place.mine / "name", place.theirs / "entry", place.theirs / "entry"
    as_user(place.us, lambda: target.write_text("mine"))
    if "pipe" in kind:
        as_user(MALLORY, lambda: os.mkfifo(entry))
        entry.chmod(0o666)
    elif kind == "link":
        as_user(MALLORY, lambda: entry.symlink_to(target))
    else:
        as_user(MALLORY, lambda: entry.symlink_to(place.mine))
        path = entry / "name"
    reader = os.open(entry, os.O_RDONLY | os.O_NONBLOCK) if "reader" in kind else None
    if through_ours:
        as_user(place.us, lambda: (place.mine / "near").symlink_to(path))
        path = place.mine / "near"

    def append():
        os.close(open_regular(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT))

    for write in (lambda: write_text(path, "theirs"), lambda: make_directory_of(path)):
        with pytest.raises(UsageError, match=r"is a (symbolic link|pipe) of another user"):
            as_user(place.us, write)
    with pytest.raises(OSError, match=r"link of another user|not a regular|No such device"):
        as_user(place.us, append)
    assert target.read_text() == "mine"
    if reader is not None:
        assert os.read(reader, 9) == b""
        os.close(reader)


def test_links_of_ones_own_are_followed_to_their_end(tmp_path):
    (tmp_path / "near").symlink_to(tmp_path / "wide" / ".." / "dir")
    (tmp_path / "dir").mkdir()
    (tmp_path / "wide").mkdir()
    write_text(tmp_path / "near" / "x", "new")
    assert read_limited(tmp_path / "near" / "x", 3) == b"new"
    assert (tmp_path / "dir" / "x").read_text() == "new"
    (tmp_path / "one").symlink_to("two")
    (tmp_path / "two").symlink_to("one")
    with pytest.raises(UsageError, match="Too many levels of symbolic links"):
        write_text(tmp_path / "one" / "x", "text")


def test_what_is_no_file_or_too_large_is_not_opened(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "device").symlink_to("/dev/zero")
    (tmp_path / "large").write_text("four")
    for name, why in {
        "pipe": "not a regular",
        "device": "not a regular",
        ".": "directory",
        "large": "larger",
    }.items():
        with pytest.raises(OSError, match=why):
            read_limited(tmp_path / name, 3)
    for flags in (os.O_WRONLY | os.O_CREAT, os.O_RDWR):
        with pytest.raises(OSError, match=r"not a regular|No such device"):
            open_regular(tmp_path / "pipe", flags)


ESCAPES = "\x1b[2J\x1b]0;owned\x07\x9b31m\u202eevil\u2066\x7f\r\n\u2028end"


def test_fields_with_escapes_neither_reach_the_terminal_nor_look_like_lines(tmp_path, monkeypatch):
    forged = f"{ESCAPES}\n  error         all is well"
    run = make_run(tmp_path)
    record = {**json.loads(run.record.read_text()), "name": forged, "kind": forged, "tag": forged}
    run.record.write_text(json.dumps({**record, "scheduler": forged}))
    beat = {"attempt": 1, "state": forged, "step": 1, "steps": 9, "ranks": [
        {"rank": 0, "host": forged, "node": forged, "waiting": 0.9},
        {"rank": 1, "host": forged, "node": forged, "waiting": 0.0},
    ]}  # fmt: skip
    run.start.heartbeat.write_text(json.dumps(beat))
    report = {"rank": 0, "type": forged, "message": forged, "host": forged, "action": forged}
    run.start.error_of(0).write_text(json.dumps({**report, "hint": forged, "traceback": forged}))
    line = {"attempt": 1, "step": 1, "loss": 1.0, "evaluation": {forged: 1.0}}
    run.metrics.write_text(json.dumps(line) + "\n")
    run.job_log.write_text(ESCAPES)
    run.script.write_text(ESCAPES)
    monkeypatch.chdir(tmp_path)
    for words in LOOKING:
        found = command(*(str(tmp_path) if word == "theirs" else word for word in words))()
        assert not set(found.out + found.err) & set("\x1b\x07\x9b\u202e\u2066\x7f\r\u2028"), words
        if "--json" in words:
            assert json.loads(found.out)[0]["kind"] == forged
        elif words[:2] == ("status", "last"):
            shown = [each for each in found.out.splitlines() if each.startswith("  error  ")]
            assert len(shown) == 1


def test_names_that_mean_something_to_a_shell_or_terminal_are_no_runs(tmp_path):
    """They are offered where a run is to be named: a shell would run what they hold."""
    for name in ("$(touch owned)", "`touch owned`", "a;b", "a\nb", f"a{ESCAPES}", "a b", "~", "'"):
        (tmp_path / f"20240101-000000-{name}").mkdir()
        (tmp_path / f"sweeps/20240101-000000-{name}").mkdir(parents=True)
    good = make_run(tmp_path)
    assert list_runs(tmp_path) == [good]
    assert list_sweeps(tmp_path) == []


def put(user, path, text):
    """A file of a user that everybody may read."""

    def write():
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o755)
        path.write_text(text)
        path.chmod(0o644)
        return path

    return as_user(user, write)


def test_no_code_of_others_runs_without_a_word(place, code):
    """Of a job of ours that names it, and of a job of theirs."""
    run = as_user(place.us, lambda: make_run(place.mine, kind="training"))
    put(place.us, run.start.exit_code, "1\n")
    model = put(MALLORY, place.theirs / "model.py", code)
    put(place.us, run.job, JOB.replace("MODEL", str(model)))
    theirs = put(MALLORY, place.theirs / "job.yaml", JOB.replace("MODEL", str(model)))
    resume = ("resume", "last", "-d", str(place.mine))
    for words, path in ((resume, model), (("lab", "verify", str(theirs)), theirs)):
        found = as_user(place.us, command(*words))
        assert found.code == UsageError.exit_code, found.err
        assert f"{path} belongs to the user {MALLORY}, and its code would run as you" in found.err
        assert "--trust-owner" in found.err
    model = put(place.us, place.mine / "model.py", code)
    put(place.us, run.job, JOB.replace("MODEL", str(model)))
    model.chmod(0o666)
    found = as_user(place.us, command(*resume))
    assert f"{model} can be changed by everybody" in found.err
    assert not (place.mine / "ran").exists()


@pytest.mark.parametrize("spoiled", ["model.py", "", "pk", "pk/__init__.py", "pk/net.py"])
def test_files_modules_and_packages_of_others_run_with_a_word_or_not_at_all(place, code, spoiled):
    root, job = place.mine / "code", place.mine / "job.yaml"
    for name in ("model.py", "pk/__init__.py", "pk/net.py"):
        put(place.us, root / name, code)
    model = "model.py" if spoiled == "model.py" else "pk.net"
    put(place.us, job, JOB.replace("MODEL", f"{root}/{model}"))
    os.chown(root / spoiled, MALLORY, MALLORY)
    found = as_user(place.us, command("lab", "verify", str(job)))
    assert found.code == UsageError.exit_code, found.err
    who = f"{root / spoiled} belongs to the user {MALLORY}"
    assert f"{who}, and its code would run as you" in found.err
    found = as_user(place.us, command("submit", str(job), "--dry-run", "--scheduler", "slurm"))
    assert f"warning: {who}; its code runs as you" in found.err
    assert not (place.mine / "ran").exists()


def test_a_directory_that_users_share_hides_no_run(place):
    """A run that only its owner may read is a row; what a command did last is the user's own."""
    group = place.theirs
    group.chmod(0o1777)
    closed = as_user(MALLORY, lambda: make_run(group, time=LATE + 9))
    mine = as_user(place.us, lambda: RunDirectory.create(group, "mine", LATE - 9))
    record = Record("mine", "local", f"{mine.name} tag", LATE, ranks=2, nodes=1, steps=9)
    as_user(place.us, lambda: record.save(mine.record))
    listed = as_user(place.us, command("status", "-d", str(group)))
    assert listed.code == 0, listed.err
    assert closed.name in listed.out
    last = as_user(place.us, command("status", "last", "-d", str(group), "--json"))
    assert json.loads(last.out)["run"] == mine.name
    spec = SimpleNamespace(name="demo", output=SimpleNamespace(directory=group))
    assert as_user(place.us, lambda: plan_path(spec)) == group / "demo.plan.json"
    as_user(MALLORY, lambda: (group / "demo.plan.json").touch(0o600))
    own = "" if place.us == ROOT else f"-{place.us}"
    assert as_user(place.us, lambda: plan_path(spec)) == group / f"demo{own}.plan.json"
    if place.us == ROOT:
        return
    told = as_user(place.us, command("status", closed.name, "-d", str(group)))
    assert f"not readable: owner the user {MALLORY}" in told.out
    assert "not readable" in listed.out
    for words in (("logs",), ("cancel",), ("resume",), ("report",)):
        refused = as_user(place.us, command(*words, closed.name, "-d", str(group)))
        assert refused.code != 0
        assert "Traceback" not in refused.err


def test_users_who_share_a_directory_have_sweeps_of_their_own(place):
    """Who owns the directory of a script could exchange it before sbatch reads it."""
    group = place.theirs
    group.chmod(0o1777)

    def create(points, now):
        return SweepDirectory.create(group, "demo", points, now)

    theirs, _ = as_user(MALLORY, lambda: create(1, LATE))
    mine, runs = as_user(place.us, lambda: create(2, LATE))
    again, _ = as_user(place.us, lambda: create(1, LATE + 9))
    assert theirs.path.parent == group / "sweeps"
    assert mine.path.parent == again.path.parent == group / f"sweeps-{place.us}"
    assert sweep_of(runs[1], mine.name) == mine
    for sweep, user in ((theirs, MALLORY), (mine, place.us)):
        assert sweep.path.stat().st_uid == user
        assert stat.S_IMODE(sweep.path.parent.stat().st_mode) == 0o700
    shown = as_user(place.us, lambda: (list_sweeps(group), find(group, mine.name), mine.runs()))
    assert shown[0][-2:] == [mine, again]
    assert shown[1:] == (mine, runs)
    assert as_user(place.us, lambda: find(group, str(mine.path))) == mine
    shutil.rmtree(mine.path.parent)
    as_user(MALLORY, lambda: mine.path.parent.mkdir(0o777))
    mine.path.parent.chmod(0o777)
    with pytest.raises(UsageError, match=f"belongs to the user {MALLORY}"):
        as_user(place.us, lambda: create(1, LATE + 99))
    assert not list(mine.path.parent.iterdir())


def test_files_that_another_node_has_just_replaced_are_asked_for_again(tmp_path, monkeypatch):
    file = tmp_path / "file"
    file.write_text("new")
    left = {"stat": 2, "open": 2}

    def make_stale(name, real):
        def stale(*words, **more):
            if str(words[0]) == str(file) and left[name]:
                left[name] -= 1
                raise OSError(errno.ESTALE, "Stale file handle", str(file))
            return real(*words, **more)

        monkeypatch.setattr(os, name, stale)

    for name in left:
        make_stale(name, vars(os)[name])
    assert is_there(file)
    assert read_limited(file, 10) == b"new"
    assert left == {"stat": 0, "open": 0}
