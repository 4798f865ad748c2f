#!/bin/sh
# What only a machine with a GPU can show, in ten minutes (see checks.py). Nothing is fetched there:
# packages that it lacks come along as wheels.
#
#   tests/gpu/run.sh --wheels           download them into build/wheels, on a machine with a network
#   tests/gpu/run.sh [OUT]              check; OUT (build/gpu) gets results.json, results.md, parts.log
#   tests/gpu/run.sh --emulated [OUT]   the same with the pretended accelerator of tests/accelerator
#
# PYTHON (python3) has torch; --emulated needs one that has pipectl and its test packages. WHEELS
# (build/wheels) are for Python 3.12 (FOR).
set -eu
cd "$(dirname "$0")/../.."
WHEELS=${WHEELS:-build/wheels} PYTHON=${PYTHON:-python3}

if [ "${1:-}" = --wheels ]; then
    mkdir -p "$WHEELS"
    platforms=$(for name in manylinux_2_28 manylinux_2_17 manylinux2014 manylinux_2_5 manylinux1; do
        echo "--platform ${name}_x86_64"; done)
    # All that pipectl and the tests import, but torch, numpy and llvmlite, which are large.
    names='mpich|mpi4py|pydantic|pydantic_core|annotated-types|typing-inspection|typing_extensions'
    names="$names|typer|click|shellingham|annotated-doc|rich|markdown-it-py|mdurl|Pygments|psutil"
    names="$names|PyYAML|safetensors|Jinja2|MarkupSafe|pytest|pluggy|iniconfig|packaging"
    names="$names|pytest-timeout|pytest-xdist|execnet|hypothesis|sortedcontainers"
    # shellcheck disable=SC2046,SC2086
    "$PYTHON" -m pip download --quiet --no-deps --only-binary :all: --dest "$WHEELS" \
        --python-version "${FOR:-3.12}" $platforms $(grep -E "^($names)==" constraints.txt)
    du -sh "$WHEELS"
    exit
fi

if [ "${1:-}" = --emulated ]; then # PYTHON has all packages
    exec "$PYTHON" tests/gpu/checks.py "${2:-build/gpu}" --emulated
fi

out=${1:-build/gpu}
mkdir -p "$out"
venv=$(mktemp -d)
trap 'rm -rf "$venv"' EXIT
"$PYTHON" -m venv --without-pip "$venv"
site=$("$venv/bin/python" -c 'import site; print(site.getsitepackages()[0])')
"$PYTHON" -c 'import pathlib, torch; print(pathlib.Path(torch.__file__).parents[1])' > "$site/torch.pth"
pwd > "$site/checkout.pth"
"$PYTHON" -m pip --python "$venv/bin/python" install --quiet --no-index --no-deps "$WHEELS"/*.whl
"$venv/bin/python" -c 'import hypothesis, jinja2, llvmlite, mpi4py, numpy, psutil, pydantic, pytest
import pytest_timeout, rich, safetensors, torch, typer, xdist, yaml'
command -v "$venv/bin/mpiexec" > /dev/null
printf '#!%s\nimport sys\nfrom pipectl.cli import main\nsys.exit(main())\n' "$venv/bin/python" \
    > "$venv/bin/pipectl"
chmod +x "$venv/bin/pipectl"
PATH="$venv/bin:$PATH" "$venv/bin/python" tests/gpu/checks.py "$out"
