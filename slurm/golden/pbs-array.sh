#!/bin/bash
#PBS -S /bin/bash
#PBS -N gpt-small.7f3a9c
#PBS -A 'proj 123'
#PBS -P climate
#PBS -q gpu
#PBS -m ae
#PBS -M a@b.org
#PBS -l select=2:ncpus=32:mpiprocs=2:ompthreads=16:ngpus=4:mem=245760mb:model=icelake
#PBS -l place=scatter:excl
#PBS -l walltime=36:00:00
#PBS -r y
#PBS -j oe
#PBS -k doe
#PBS -o '/scratch/u/my runs/100%/sweeps/20261120-152233-it'"'"'s/logs/pbs.^array_index^.log'
#PBS -J 0-2
#PBS -W max_run_subjobs=2
#PBS -W depend=afterok:41.vm
#PBS -W group_list=physics

set -uo pipefail
runs=(
    '/scratch/u/my runs/100%/20261120-152233-it'"'"'s-0'
    '/scratch/u/my runs/100%/20261120-152233-it'"'"'s-1'
    '/scratch/u/my runs/100%/20261120-152233-it'"'"'s-2'
)
run=${runs[$PBS_ARRAY_INDEX]}
exec >>"$run/logs/job.log" 2>&1
exec /bin/bash "$run/job.sh"
