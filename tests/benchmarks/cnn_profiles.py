"""Profiles of ten convolutional networks, measured by ``pipectl profile``'s own code.

The networks are those of the antichain paper (Table 1), unchanged from torchvision, on images of
CIFAR-10's shape at batch 128 with SGD and momentum; AlexNet and Inception-v3 take no images of 32
pixels and get the smallest they take (64 and 75, Inception without its auxiliary classifier). One
thread, no neighbours, micro-batches of 2 to 128 samples. Finished profiles are kept in a folder.

Usage: python tests/benchmarks/cnn_profiles.py [--folder DIR] [NAME ...]
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

import yaml

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "corpus"))

import packages

from pipectl.profile import Profile
from pipectl.profiler import profile_job
from pipectl.profiler.effort import Effort
from pipectl.spec import load

CORPUS = Path(__file__).resolve().parents[1] / "corpus"
BATCH = 128
FOLDER = Path("build/planner-profiles")
PIXELS = {
    "vgg16": 32,
    "resnet18": 32,
    "resnet50": 32,
    "resnet101": 32,
    "alexnet": 64,
    "resnext50_32x4d": 32,
    "resnext101_32x8d": 32,
    "inception_v3": 75,
    "densenet121": 32,
    "squeezenet1_0": 32,
}
_KWARGS = {"inception_v3": {"aux_logits": False, "init_weights": False}}


def profile_of(name: str, folder: Path = FOLDER) -> Profile:
    """The profile of one network, measured in a process of its own if the folder lacks it."""
    path = folder / f"{name}.json"
    if not path.exists():
        command = [sys.executable, __file__, "--folder", str(folder), name]
        subprocess.run(command, check=True)
    return Profile.load(path)


def measure(name: str, folder: Path) -> None:
    """Profile one network and write the file."""
    folder.mkdir(parents=True, exist_ok=True)
    packages.declare_torchvision()
    document = {
        "version": 1,
        "name": name,
        "site_defaults": False,
        "model": {
            "factory": f"{CORPUS}/vision.py:build",
            "kwargs": {"name": name, **_KWARGS.get(name, {})},
        },
        "loss": {"factory": "torch.nn:CrossEntropyLoss"},
        "data": {
            "factory": f"{CORPUS}/own.py:Images",
            "kwargs": {"pixels": PIXELS[name], "classes": 10},
        },
        "optimizer": {"factory": "torch.optim:SGD", "kwargs": {"lr": 0.01, "momentum": 0.9}},
        "training": {"steps": 1, "batch_size": BATCH, "seed": 0},
        "resources": {"nodes": 8, "tasks_per_node": 1, "cpus_per_task": 1},
    }
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(document))
    profile_job(load(path), effort=Effort.NORMAL).save(folder / f"{name}.json")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=FOLDER)
    parser.add_argument("names", nargs="*", help="all by default")
    given = parser.parse_args()
    for name in given.names or PIXELS:
        measure(name, given.folder)


if __name__ == "__main__":
    main()
