#!/bin/bash
# pipectl gpt-small 7f3a9c
/opt/env/bin/python -m pipectl.jobs.sweep_driver '/scratch/u/my runs/100%/sweeps/20261120-152233-it'"'"'s'
exit "$?"
