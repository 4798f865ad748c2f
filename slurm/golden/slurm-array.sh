#!/bin/bash
#SBATCH --job-name=gpt-small
#SBATCH --comment=7f3a9c
#SBATCH --account=proj123
#SBATCH --partition=gpu
#SBATCH --qos=normal
#SBATCH --constraint="a100&nvlink"
#SBATCH --reservation="maintenance week"
#SBATCH --gres=nvme:1
#SBATCH --licenses=matlab:2
#SBATCH --nodelist="n[1-2]"
#SBATCH --exclude=n7
#SBATCH --mail-type=END,FAIL
#SBATCH --mail-user=a@b.org
#SBATCH --exclusive
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=2
#SBATCH --cpus-per-task=16
#SBATCH --gpus-per-node=4
#SBATCH --mem=245760M
#SBATCH --time=36:00:00
#SBATCH --chdir="/scratch/u/my runs/100%/sweeps/20261120-152233-it's"
#SBATCH --output="/scratch/u/my runs/100%%/sweeps/20261120-152233-it's/logs/job.log"
#SBATCH --open-mode=append
#SBATCH --signal=B:USR2@180
#SBATCH --requeue
#SBATCH --dependency=afterok:41:42_1
#SBATCH --kill-on-invalid-dep=yes
#SBATCH --array=0-2%2
#SBATCH --switches=1

set -uo pipefail
runs=(
    '/scratch/u/my runs/100%/20261120-152233-it'"'"'s-0'
    '/scratch/u/my runs/100%/20261120-152233-it'"'"'s-1'
    '/scratch/u/my runs/100%/20261120-152233-it'"'"'s-2'
)
run=${runs[$SLURM_ARRAY_TASK_ID]}
exec >>"$run/logs/job.log" 2>&1
exec /bin/bash "$run/job.sh"
