"""When a job would start on Slurm, by what the jobs there have and are expected to get."""

import pytest

from pipectl.batch.limits import Demand
from pipectl.batch.slurm_output import expand_hosts, parse_bookings

CONFIG = """\
Configuration data as of 2026-12-01T04:50:44
PreemptType             = preempt/none
PrivateData             = none
SelectType              = select/cons_tres
SelectTypeParameters    = CR_CORE
"""
NODES = "".join(
    f"node{number}|{partition}|allocated|4|4000|gpu:2|NO|1\n"
    for number in (1, 2, 3, 4)
    for partition in ("debug", "short")
    if partition == "debug" or number > 2
)
RUNS = "RUNNING|debug|0|60|16|node[1-4]|(null)|NO|None"
WAITS = "PENDING|debug|60|180|3||node[1-3]|NO|Resources"
MINUTE = 60


def asked(*jobs, nodes=NODES, reservations="No reservations in the system", config=CONFIG):
    """``ask(nodes, minutes)``: in how many seconds, and a ``?`` if that is not sure."""
    lines = "".join(f"{job}\n" for job in jobs)
    bookings = parse_bookings(lines, nodes, reservations, config)

    def ask(count, minutes, partition="debug", now=0.0, earliest=0.0, is_whole=False, **demand):
        walltime_s = minutes and minutes * MINUTE
        wanted = Demand(count, walltime_s, **{"cores": 1, **demand})
        found = bookings.expect(partition, wanted, now, earliest, is_whole=is_whole)
        return found and f"{found.start:.0f}{'' if found.is_sure else '?'}"

    return ask


def test_a_job_comes_beside_or_after_one_that_waits():
    """Measured: Slurm starts them so, and `sbatch --test-only` says 121 for all."""
    ask = asked(RUNS, WAITS)
    assert [ask(nodes, 10) for nodes in (1, 2, 4)] == ["60", "180", "180"]
    assert ask(5, 10) is None
    # Of the nodes of `short`, the job that waits takes one.
    assert [ask(nodes, 1, "short") for nodes in (1, 2)] == ["60", "180"]


def test_short_jobs_come_before_one_that_waits():
    ask = asked(
        "RUNNING|debug|0|600|8|node[1-2]|(null)|NO|None", WAITS.replace("|60|180", "|600|900")
    )
    assert [ask(2, minutes) for minutes in (5, 10, 11)] == ["0", "0", "900"]
    assert [ask(1, minutes) for minutes in (10, 11, None)] == ["0", "0", "0"]
    assert ask(2, None) == "900"
    assert [ask(1, minutes, now=60.0) for minutes in (9, 10)] == ["60", "60"]
    assert [ask(2, minutes, now=60.0) for minutes in (9, 10)] == ["60", "900"]


def test_a_job_that_is_requeued_comes_after_those_that_wait():
    """Measured: it came after the job that its own end let in."""
    ask = asked(RUNS, WAITS)
    starts = [ask(2, 1, earliest=time) for time in (0.0, 30.0, 70.0, 180.0, 200.0)]
    assert starts == ["180", "180", "180", "180", "200"]
    assert [ask(1, 10, earliest=time) for time in (30.0, 70.0)] == ["60", "70"]
    ask = asked(
        "RUNNING|debug|0|600|8|node[1-2]|(null)|NO|None", WAITS.replace("|60|180", "|600|900")
    )
    assert [ask(2, 5, earliest=time) for time in (300.0, 301.0)] == ["300", "900"]


def test_where_nothing_waits_on_its_nodes_they_do_not_tell():
    assert asked(RUNS)(1, 1) is None
    ask = asked(RUNS, WAITS.replace("node[1-3]", "node[1-2]"))
    assert ask(1, 1) == "60"
    assert ask(1, 1, "short") is None
    for unplanned in (
        WAITS.replace("node[1-3]", "(null)"),
        WAITS.replace("60|180", "N/A|N/A").replace("node[1-3]", "(null)"),
        WAITS.replace("Resources", "JobHeldUser"),
        "a line of the site",
    ):
        assert asked(RUNS, unplanned)(1, 1) is None
        assert asked(RUNS, WAITS, unplanned)(1, 10) == "60"


def test_jobs_of_other_partitions_have_the_nodes_they_share():
    ask = asked(RUNS.replace("debug", "other"), WAITS.replace("debug", "other,more"))
    assert [ask(nodes, 10) for nodes in (1, 2, 4)] == ["60", "180", "180"]


def test_cores_of_a_node_are_shared_unless_a_job_has_it_whole():
    two_cores = "RUNNING|debug|0|600|2|node1|(null)|OK|None"
    both = "PENDING|debug|60|180|4||node[2-3]|OK|Resources"
    ask = asked(two_cores, both, RUNS.replace("[1-4]", "4"))
    assert [ask(1, 10, cores=cores) for cores in (1, 2, 3, 4)] == ["0", "0", "60", "60"]
    assert [ask(nodes, 10, cores=2) for nodes in (2, 3, 4)] == ["0", "0", "60"]
    assert [ask(nodes, 10, cores=4) for nodes in (1, 2, 3, 4)] == ["60", "180", "180", "600"]
    assert [ask(nodes, 10, is_whole=True) for nodes in (1, 2)] == ["60", "180"]
    assert ask(1, 10, cores=5) is None
    for whole in (
        {"nodes": NODES.replace("|NO|1", "|EXCLUSIVE|1")},
        {"config": CONFIG.replace("cons_tres", "linear").replace("CR_CORE", "NONE")},
    ):
        ask = asked(two_cores, both, RUNS.replace("[1-4]", "4"), **whole)
        assert [ask(nodes, 10, cores=2) for nodes in (1, 2, 4)] == ["60", "180", "600"]


def test_two_jobs_on_a_node_have_cores_of_their_own():
    first = "RUNNING|debug|0|600|2|node1|(null)|OK|None"
    later = "PENDING|debug|300|900|1||node1|OK|Priority"
    ask = asked(first, later, RUNS.replace("[1-4]", "[2-4]").replace("|60|", "|1200|"))
    assert [ask(1, 10, cores=cores) for cores in (1, 2, 3, 4)] == ["0", "600", "600", "900"]
    assert [ask(1, minutes, cores=2) for minutes in (5, 6)] == ["0", "600"]


@pytest.mark.parametrize("state", ["down*", "drained", "draining", "idle*", "fail", "unknown"])
def test_nodes_that_take_no_jobs_are_not_counted(state):
    ask = asked(
        RUNS,
        WAITS,
        nodes=NODES.replace("node4|debug|allocated", f"node4|debug|{state}").replace(
            "node4|short|allocated", f"node4|short|{state}"
        ),
    )
    assert [ask(nodes, 10) for nodes in (1, 3, 4)] == ["180", "180", None]


@pytest.mark.parametrize(
    "state", ["idle", "mixed", "planned", "idle~", "mixed+", "powering_up#", "mixed-"]
)
def test_nodes_that_take_jobs_are_counted(state):
    ask = asked(RUNS, WAITS, nodes=NODES.replace("allocated", state))
    assert ask(1, 10) == "60"


def test_nodes_have_what_the_job_asks_for():
    kinds = {"node4": "4|1000|(null)"}
    lines = [line.split("|") for line in NODES.splitlines()]
    small = "".join(
        f"{'|'.join(line[:3])}|{kinds.get(line[0], '4|4000|gpu:2')}|NO|1\n" for line in lines
    )
    ask = asked(RUNS, WAITS, nodes=small)
    assert ask(1, 10, memory_bytes=1000 * 2**20) == "60"
    assert ask(1, 10, memory_bytes=1001 * 2**20) == "180"
    assert ask(1, 10, gpus=1) == "180"
    assert ask(4, 10, gpus=1) is None
    assert (
        asked(RUNS, WAITS, nodes=NODES.replace("|4000|", "|1|"))(1, 10, memory_bytes=2**40) == "60"
    )


def test_what_jobs_on_one_node_share_besides_cores_is_not_seen():
    part = "RUNNING|debug|0|600|2|node4|(null)|OK|None"
    jobs = (part, RUNS.replace("[1-4]", "[1-3]"), WAITS)
    with_memory = CONFIG.replace("CR_CORE", "CR_CORE_MEMORY")
    assert asked(*jobs)(1, 10) == "0"
    assert asked(*jobs)(1, 10, gpus=1) == "0?"
    assert asked(*jobs)(1, 10, gpus=1, is_whole=True) == "180"
    assert asked(*jobs, config=with_memory)(1, 10) == "0?"
    assert asked(*jobs, config=with_memory)(1, 10, is_whole=True) == "180"
    assert asked(RUNS, WAITS, config=with_memory)(1, 10, gpus=1) == "60"


def test_late_and_endless_jobs():
    late = asked(RUNS, WAITS)
    assert [late(nodes, 10, now=100.0) for nodes in (1, 2)] == ["100", "220"]
    ended = RUNS.replace("RUNNING", "COMPLETING")
    assert asked(ended, WAITS)(1, 10, now=61.0) == "61"
    endless = asked(RUNS.replace("|60|", "|N/A|").replace("[1-4]", "4"), WAITS)
    assert [endless(nodes, 10) for nodes in (3, 4)] == ["180", None]
    starts = asked(RUNS.replace("RUNNING", "CONFIGURING"), WAITS)
    assert [starts(nodes, 10) for nodes in (1, 2)] == ["60", "180"]


def test_where_not_all_is_seen_the_start_is_not_sure():
    unknown = RUNS.replace("node[1-4]", "node[1-5]")
    suspended = RUNS.replace("RUNNING", "SUSPENDED")
    private = CONFIG.replace("= none\nSelect", "= accounts,jobs\nSelect")
    assert private != CONFIG
    assert asked(unknown, WAITS)(1, 10) == "60?"
    assert asked(suspended, WAITS)(1, 10) == "60?"
    assert asked(RUNS, WAITS, config=private)(1, 10) == "60?"
    assert asked(RUNS, WAITS, config=None)(1, 10) == "60?"
    assert asked(RUNS, WAITS, reservations=None)(1, 10) == "60?"
    assert asked(RUNS, WAITS)(1, 10, cores=None) == "60?"


def test_reservations_that_a_job_would_meet_make_its_start_unsure():
    kept = (
        "ReservationName=work StartTime=700 EndTime=900 Duration=00:03:20 Nodes=node[2-3] NodeCnt=2"
    )
    ask = asked(RUNS, WAITS, reservations=kept)
    assert [ask(1, minutes) for minutes in (10, 11)] == ["60", "60?"]
    assert ask(2, 1) == "180"
    assert ask(1, 60, "short") == "60?"
    assert asked(RUNS, WAITS, reservations=kept)(1, 11, now=1000.0) == "1000"
    elsewhere = kept.replace("node[2-3]", "(null)")
    assert asked(RUNS, WAITS, reservations=elsewhere)(1, 11) == "60"
    local_times = kept.replace("700", "2026-12-01T05:00:56").replace("900", "2026-12-01T05:10:56")
    assert asked(RUNS, WAITS, reservations=local_times)(1, 1) == "60?"


def test_partitions_of_a_higher_tier_come_first():
    high = NODES + NODES.replace("debug", "high").replace("|NO|1", "|NO|9")
    jobs = (
        RUNS,
        WAITS,
        WAITS.replace("debug", "high").replace("60|180", "180|240").replace("[1-3]", "1"),
    )
    ask = asked(*jobs, nodes=high)
    assert [ask(nodes, 1, "high") for nodes in (3, 4)] == ["60", "60"]
    assert [ask(nodes, 3, "high") for nodes in (3, 4)] == ["60", "240"]
    preempts = CONFIG.replace("preempt/none", "preempt/partition_prio")
    assert asked(*jobs, nodes=high, config=preempts)(1, 1, "high") is None
    assert asked(*jobs, nodes=high, config=preempts)(1, 1) == "60"
    forced = NODES.replace("|NO|1", "|FORCE:4|1")
    assert asked(RUNS, WAITS, nodes=forced)(1, 1) is None
    assert asked(RUNS, WAITS, nodes=NODES.replace("|NO|1", "|FORCE:1|1"))(1, 1) == "60"


@pytest.mark.parametrize(
    ("hosts", "names"),
    [
        ("node1", "node1"),
        ("node[1-3]", "node1 node2 node3"),
        ("login,n[08-10,2]-ib,x", "login n08-ib n09-ib n10-ib n2-ib x"),
        ("r[1-2]n[1-2]", "r1n1 r1n2 r2n1 r2n2"),
        ("(null)", ""),
        ("", ""),
        ("cray[a-c]", "cray[a-c]"),
    ],
)
def test_lists_of_hosts(hosts, names):
    assert " ".join(expand_hosts(hosts)) == names
