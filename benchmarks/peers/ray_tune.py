"""Ray Tune driver: the values and the model of the benchmark ``search``, ASHA, two trials at once.

Each trial appends the begin and the end of its steps to a file of its own. Trials are stopped by
Ray, which ends their processes, so a line is complete before the next step begins.
"""

from __future__ import annotations

import json
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import ray
import torch
from ray import tune
from ray.tune.schedulers import ASHAScheduler

from benchmarks.models import search_work

NUM_TRIALS_AT_ONCE = 2
OBJECT_STORE_BYTES = 100 * 2**20


def main() -> None:
    """Start a Ray cluster on this machine, search, and shut the cluster down."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    path = Path(sys.argv[1])
    task = json.loads(path.read_text())
    # Ray creates its sockets in this folder, and the path of a socket must be short.
    with tempfile.TemporaryDirectory(prefix="ray") as folder:
        ray.init(
            num_cpus=NUM_TRIALS_AT_ONCE,
            include_dashboard=False,
            log_to_driver=False,
            object_store_memory=OBJECT_STORE_BYTES,
            _temp_dir=folder,
            _node_ip_address="127.0.0.1",
        )
        try:
            search(task, path.parent)
        finally:
            ray.shutdown()


def search(task: dict[str, Any], folder: Path) -> None:
    """Run the trials of a task."""
    fixed = {"model": task["model"], "epochs": task["epochs"], "folder": str(folder)}
    values = [{**fixed, **params, "number": n} for n, params in enumerate(task["tried"])]
    scheduler = ASHAScheduler(
        time_attr="training_iteration", max_t=task["epochs"], grace_period=1, reduction_factor=4
    )
    tuner = tune.Tuner(
        tune.with_resources(train, {"cpu": 1}),
        param_space={"trial": tune.grid_search(values)},
        tune_config=tune.TuneConfig(
            metric="accuracy",
            mode="max",
            scheduler=scheduler,
            max_concurrent_trials=NUM_TRIALS_AT_ONCE,
        ),
        run_config=tune.RunConfig(name="benchmark", storage_path=str(folder / "ray"), verbose=0),
    )
    errors = tuner.fit().errors
    if errors:
        raise errors[0]


def train(config: dict[str, Any]) -> None:
    """Train one trial, and report the accuracy after each epoch."""
    values = config["trial"]
    torch.set_num_threads(1)
    train_set, eval_set = search_work.make_digits()
    model = search_work.MODELS[values["model"]](values["width"], values["seed"])
    optimizer = torch.optim.Adam(model.parameters(), lr=values["lr"])
    inputs, targets = train_set.tensors
    order = torch.Generator().manual_seed(values["number"])
    with (Path(values["folder"]) / f"steps-{values['number']}.jsonl").open("a") as steps:
        for _ in range(values["epochs"]):
            shuffled = torch.randperm(len(inputs), generator=order)
            for batch in shuffled.tensor_split(len(inputs) // search_work.BATCH):
                begin = time.time()
                optimizer.zero_grad()
                loss = search_work.slow_loss(model(inputs[batch]), targets[batch])
                loss.backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                steps.write(json.dumps([begin, time.time()]) + "\n")
                steps.flush()
            with torch.no_grad():
                hits = search_work.accuracy(model(eval_set.tensors[0]), eval_set.tensors[1])
            tune.report({"accuracy": float(hits.mean())})


if __name__ == "__main__":
    main()
