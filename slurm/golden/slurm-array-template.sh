#!/bin/bash -l
# Every job of this group keeps its scratch files apart, and removes them.
#SBATCH --switches=1
#PBS -p 5
#SBATCH --job-name=gpt-small
#SBATCH --comment=7f3a9c
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=2
#SBATCH --cpus-per-task=1
#SBATCH --time=00:30:00
#SBATCH --chdir="/scratch/u/my runs/100%/sweeps/20261120-152233-it's"
#SBATCH --output="/scratch/u/my runs/100%%/sweeps/20261120-152233-it's/logs/job.log"
#SBATCH --open-mode=append
#SBATCH --no-requeue
#SBATCH --array=0-2

set -uo pipefail
runs=(
    '/scratch/u/my runs/100%/20261120-152233-it'"'"'s-0'
    '/scratch/u/my runs/100%/20261120-152233-it'"'"'s-1'
    '/scratch/u/my runs/100%/20261120-152233-it'"'"'s-2'
)
run=${runs[$SLURM_ARRAY_TASK_ID]}
exec >>"$run/logs/job.log" 2>&1
exec /bin/bash -l "$run/job.sh"
