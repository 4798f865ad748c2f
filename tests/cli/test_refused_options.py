"""Wrong command lines: each is refused in a sentence that says what to do, and makes nothing.

The words are in one golden file.
"""

from pathlib import Path

NINES = "9" * 400
LINES = f"""\
--json status
cancel
cancel 20250101-120000-tinny
check
check job.yaml --json
check job.yaml --schema
check job.yaml -o x
check nope.yaml
doctor --set training.steps=1
doctor job.yaml -d elsewhere
doctor no-job.yaml
export last
export last --shard-size 0
export last --step 0
foo
init new --account mine
init new --data data.py:rows
init new --gpus-per-node -1
init new --loss torch.nn:MSELoss
init new --memory 0
init new --memory=
init new --nodes 0
init new --partition long
init new --walltime 0
init new --walltime=
lab plan --profile p.json --devices 2 --allow replica
lab plan --profile p.json --devices 2 --bandwidth 0GB/s
lab plan --profile p.json --devices 2 --bandwidth fast
lab plan --profile p.json --devices 2 --bandwidth {NINES}B/s
lab plan --profile p.json --devices 2 --bandwidth {NINES}bit/s
lab plan --profile p.json --devices 2 --batch-size 8
lab plan --profile p.json --devices 2 --budget soon
lab plan --profile p.json --devices 2 --communication-scale -1
lab plan --profile p.json --devices 2 --communication-scale 0
lab plan --profile p.json --devices 2 --memory-limit 0
lab plan --profile p.json --devices 2 --memory-limit x
lab plan --profile p.json --devices 2 --objective max-stage-load --explain
lab plan --profile p.json --devices 2 --objective max-stage-load --nodes 1,2
lab plan --profile p.json --devices 2 --objective max-stage-load --planner x
lab plan --profile p.json --devices 2 --objective max-stage-load -o x
lab plan --profile p.json --devices 2 --objective throughput
lab plan --profile p.json --devices 2 --planner dapple --allow replicas
lab plan --profile p.json --devices 2 --planner pipectl2
lab rehearse job.yaml --set launch.scheduler=slurm
lab simulate
lab simulate --plan plan.json --backward 2
lab simulate --plan plan.json --forward 2
lab simulate --plan plan.json --latency 2
lab simulate --plan plan.json --micro-batches 2
lab simulate --plan plan.json --ranks 2
lab simulate --plan plan.json --stages 2
lab simulate --schedule 1f1b
lab simulate --schedule 1f1b --stages 4 --micro-batches 8 --backward nan
lab simulate --schedule 1f1b --stages 4 --micro-batches 8 --cluster c
lab simulate --schedule 1f1b --stages 4 --micro-batches 8 --forward -1
lab simulate --schedule 1f1b --stages 4 --micro-batches 8 --forward 1e308
lab simulate --schedule 1f1b --stages 4 --micro-batches 8 --forward inf
lab simulate --schedule 1f1b --stages 4 --micro-batches 8 --forward nan
lab simulate --schedule 1f1b --stages 4 --micro-batches 8 --forward soon
lab simulate --schedule 1f1b --stages 4 --micro-batches 8 --latency nan
lab simulate --schedule 1f1b --stages 4 --micro-batches 8 --ranks 2
lab simulate --schedule 1f1bb --stages 2
lab simulate --schedule bad.csv
lab simulate --schedule gpipe --ranks 0
lab simulate --schedule gpipe --stages 0
lab simulate --schedule interleaved --stages 3 --micro-batches 4
lab simulate --schedule mine.csv --ranks 3
lab simulate --schedule mine.csv --stages 3
lab simulate --schedule none.csv
lab simulate --schedule zb-v --stages 3 --micro-batches 4
lab simulate --schedule zigzag --stages 4 --micro-batches 8
lab verify job.yaml --ranks 0
lab verify job.yaml --set launch.template=bad.j2
lab verify job.yaml --set pipeline.stages=3
lab verify job.yaml --steps 0
logs 20250101-120000-tinny
logs last --rank 2
logs last --script --tail 3
logs last 20250101 -f
plan
plan --batch-size 8
plan --objective max-stage-load
plan --profile p.json
plan --profile p.json --devices 0
plan --profile p.json --devices 2 --nodes 1,2
plan --profile p.json --devices 2 --scheduler slurm
plan --profile p.json --devices 2 --set name=x
plan --profile p.json --devices 2 --set pipeline.memory_limit=0
plan --profile p.json --devices 2 --set pipeline.memory_limit=x
plan --profile p.json --devices 2 --set pipeline.schedule=gpip
plan --profile p.json --devices 2 --set pipeline.stages=0
plan --profile p.json --devices 2 --set pipeline.stages=3
plan --profile p.json --nodes 0
plan --profile p.json --nodes 1 --explain
plan --profile p.json --nodes 1 -o x
plan --profile p.json --nodes 1,x
plan job.yaml
plan job.yaml --devices 0
plan job.yaml --nodes 1 --svg x.svg
profile job.yaml --effort some
profile job.yaml --fast
profile job.yaml --here
profile job.yaml --links --again
profile job.yaml --links --set resources.nodes=1 --set pipeline.stages=1
profile job.yaml --wait
report last
report last --step 0
resume
schema
simulate --json
status --ranks
status --watch
status --watch --json
status 20250101 20250102 --ranks
status 20250101-120000-tinny
submit
submit --foo
submit job.yaml --dry-run --after x
submit job.yaml --dry-run --json
submit job.yaml --dry-run --test-only
submit job.yaml --dry-run --wait
submit job.yaml --gres a --scheduler pbs
submit job.yaml --rehearse
submit job.yaml --scheduler slurm --after 20250102
submit job.yaml --scheduler slurm --after no-such-run
submit job.yaml --scheduler slurm --dry-run -t soon
submit job.yaml --scheduler slurm -t 1 --set resources.walltime=soon
submit job.yaml --test-only --after x
submit job.yaml --test-only --json
submit job.yaml --test-only --wait
submit job.yaml -A me
submit job.yaml -p debug
submit job.yaml -q long --scheduler slurm
trace last --svg x
verify job.yaml
"""


def test_wrong_command_lines(cli, job, alone, finished, failed, pipeline, golden):
    Path("mine.csv").write_text("0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n")
    Path("bad.csv").write_text("0F0,0X0")
    Path("bad.j2").write_text("{% extends base %}\n{% endfor %}\n")
    pipeline(2, 2).save(Path("plan.json"))
    before, texts = sorted(Path().rglob("*")), []
    for line in LINES.splitlines():
        result = cli(*line.split())
        assert (result.out, sorted(Path().rglob("*"))) == ("", before), line
        answer = f"$ pipectl {line}\n{result.err}exit code {result.code}\n"
        texts.append(answer.replace(NINES, "9...").replace(f"{Path.cwd()}/", ""))
    golden(*texts)
