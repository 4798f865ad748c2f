#!/bin/bash -l
#SBATCH --constraint="a100&nvlink"
#SBATCH --reservation="maintenance week"
#SBATCH --mail-type=END,FAIL
#SBATCH --exclusive
#SBATCH -x"node[3-4]"
#SBATCH --job-name=gpt-small
#SBATCH --comment=7f3a9c
#SBATCH --partition=gpu
#SBATCH --account="proj 1"
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=2
#SBATCH --cpus-per-task=16
#SBATCH --mem=245760M
#SBATCH --time=36:00:00
#SBATCH --chdir="/scratch/u/my runs/100%/sweeps/x"
#SBATCH --output="/scratch/u/my runs/100%%/sweeps/x/logs/job.log"
#SBATCH --open-mode=append
#SBATCH --export=HOME,USER,LOGNAME,SHELL,LANG
#SBATCH --no-requeue
#SBATCH --array=0-2%2

set -uo pipefail
runs=(
    '/scratch/u/my runs/100%/20261120-152233-it'"'"'s-0'
    '/scratch/u/my runs/100%/20261120-152233-it'"'"'s-1'
    '/scratch/u/my runs/100%/20261120-152233-it'"'"'s-2'
)
run=${runs[$SLURM_ARRAY_TASK_ID]}
exec >>"$run/logs/job.log" 2>&1
exec /bin/bash -l "$run/job.sh"
