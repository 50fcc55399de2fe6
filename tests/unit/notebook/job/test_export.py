from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save
from torch import nn

from etrain_jupyter.cli import main
from etrain_jupyter.errors import CheckpointError, ConfigError
from etrain_jupyter.log.event_log import EventLog
from etrain_jupyter.log.events import BestReached, JobStatusChanged, JobSubmitted
from etrain_jupyter.notebook.job.run_store import RunStore
from etrain_jupyter.notebook.job.training_job import TrainingJob
from etrain_jupyter.storage.checkpoints import LocalStore, Manifest

ROOT = Path(__file__).parents[4]


class Tied(nn.Module):
    """Embedding and output share one weight, which a checkpoint holds under both names."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.out = nn.Linear(4, 7)
        self.out.weight = self.embed.weight


@pytest.fixture
def job(tmp_path: Path) -> TrainingJob:
    """A finished job of the store ``runs``, whose best evaluation was that of step 10."""
    record = RunStore(tmp_path / "runs").create(
        {
            "name": "tied",
            "created": 1.0,
            "config": {
                "model": "Tied()",
                "checkpoint": {"best": {"metric": "loss", "mode": "min"}},
            },
        },
        job_id="tied-1",
    )
    log = EventLog(record.log_path, fsync_every_s=None)
    common: dict[str, Any] = {"job_id": "tied-1", "time": 1.0}
    log.append(
        [
            JobSubmitted(**common, name="tied", min_workers=1, max_workers=2),
            BestReached(**common, step=10, metric="loss", value=0.5),
            JobStatusChanged(**common, status="finished"),
        ]
    )
    log.close()
    return TrainingJob(record, None)


def model_of(step: int) -> Tied:
    torch.manual_seed(step)
    return Tied()


def commit(
    job: TrainingJob, step: int, *, config: bytes = b"", is_averaged: bool = False
) -> LocalStore:
    """Save the model of a step as a trainer does: copies, so that nothing is shared any more.

    The averages are twice the weights, in float64.
    """
    store = LocalStore(job.record.folder)
    folder = store.begin(step)
    tensors = {name: value.clone() for name, value in model_of(step).state_dict().items()}
    contents = {
        "model.safetensors": save(tensors, {"format": "pt"}),
        **({"config.json": config} if config else {}),
    }
    extras: dict[str, Any] = {"evaluations": {"best": []}}
    if is_averaged:
        packed = {name: {"$tensor": f"extra.ema.average.{name}"} for name in tensors}
        averages = {packed[name]["$tensor"]: 2 * value.double() for name, value in tensors.items()}
        contents["extra.safetensors"] = save(averages)
        extras["ema"] = {"num_updates": 3, "average": packed}
    contents["state.json"] = json.dumps({"extras": extras}).encode()
    parts = {name: store.put_part(folder, name, data) for name, data in contents.items()}
    facts: dict[str, Any] = {"job_id": job.id, "generation": 3, "config_digest": "", "created": 1.0}
    assert store.commit(Manifest(step=step, parts=parts, **facts))
    return store


def test_averaged_weights_are_loaded_and_exported_unless_raw_ones_are_asked_for(
    job: TrainingJob, tmp_path: Path
) -> None:
    commit(job, 10, is_averaged=True)
    raw = model_of(10).out.bias.detach()

    averaged = load_file(job.export(tmp_path / "averaged.safetensors"))

    assert averaged["out.bias"].dtype == torch.float32
    assert torch.equal(averaged["out.bias"], 2 * raw)
    assert torch.equal(averaged["out.weight"], averaged["embed.weight"])
    assert torch.equal(job.load_into(Tied(), weights="averaged").out.bias, 2 * raw)
    assert torch.equal(job.load_into(Tied(), weights="raw").out.bias, raw)
    assert_weights(job.export(tmp_path / "raw.safetensors", weights="raw"), 10)
    with safe_open(tmp_path / "averaged.safetensors", framework="pt") as file:
        assert file.metadata() == {"format": "pt", "job_id": "tied-1", "step": "10"}


def test_averaged_weights_of_a_job_without_them_are_refused(job: TrainingJob) -> None:
    commit(job, 10)

    with pytest.raises(
        CheckpointError, match="step 10 has no averaged weights: the cell does not set"
    ):
        job.state_dict(weights="averaged")
    with pytest.raises(ConfigError, match="weights='mean' is not supported"):
        job.state_dict(weights="mean")


def assert_weights(path: Path, step: int) -> None:
    model = Tied()
    model.load_state_dict(load_file(path))
    for name, value in model_of(step).state_dict().items():
        assert torch.equal(model.state_dict()[name], value), name


@pytest.mark.parametrize("options", [{}, {"model": Tied()}])
def test_folder_of_a_peft_model_is_refused_with_what_writes_its_adapters(
    job: TrainingJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    wrapped = nn.Module()
    wrapped.base_model = Tied()
    monkeypatch.setattr(sys.modules[__name__], "model_of", lambda step: wrapped)
    commit(job, 10, config=b"{}")

    with pytest.raises(ConfigError, match=r"peft model \(tensor base_model\..* Nothing") as caught:
        job.export(tmp_path / "adapters", format="transformers", **options)

    assert "job.load_into(build()).save_pretrained(folder)" in caught.value.hint
    assert not (tmp_path / "adapters").exists()


def test_export_writes_the_newest_weights_with_their_origin(
    job: TrainingJob, tmp_path: Path
) -> None:
    commit(job, 10)
    commit(job, 20)

    path = job.export(tmp_path / "new" / "tied.safetensors")

    assert_weights(path, 20)
    with safe_open(path, framework="pt") as file:
        assert file.metadata() == {"format": "pt", "job_id": "tied-1", "step": "20"}
    assert os.listdir(path.parent) == ["tied.safetensors"]  # no temporary file is left


def test_export_of_the_best_and_of_a_step_are_those(job: TrainingJob, tmp_path: Path) -> None:
    for step in (10, 20, 30):
        commit(job, step)

    assert_weights(job.export(tmp_path / "best.safetensors", which="best"), 10)
    assert_weights(job.export(tmp_path / "step.safetensors", which=20), 20)
    assert torch.equal(job.state_dict(20)["out.bias"], model_of(20).out.bias)
    assert torch.equal(job.load_into(Tied(), 20).embed.weight, model_of(20).embed.weight)


def test_a_file_is_replaced_only_on_request(job: TrainingJob, tmp_path: Path) -> None:
    commit(job, 10)
    path = tmp_path / "tied.safetensors"
    path.write_bytes(b"mine")

    with pytest.raises(ConfigError, match="already exists and was not changed"):
        job.export(path)

    assert path.read_bytes() == b"mine"
    job.export(path, overwrite=True)
    assert_weights(path, 10)


def test_full_disk_leaves_no_file(
    job: TrainingJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit(job, 10)
    folder = tmp_path / "out"
    full = OSError(errno.ENOSPC, "No space left on device")

    def fail(*_: object) -> None:
        raise full

    monkeypatch.setattr("etrain_jupyter.notebook.job.export.os.fsync", fail)

    with pytest.raises(CheckpointError, match=r"step 10 of job tied-1 .* No space left"):
        job.export(folder / "tied.safetensors")

    assert os.listdir(folder) == []


@pytest.mark.parametrize(
    ("keys", "message", "hint"),
    [
        ({"format": "onnx"}, "format='onnx' is not supported", "'safetensors' or 'transform"),
        ({"which": "worst"}, "which='worst' must be 'last' or 'best', or the step", ""),
        ({"which": True}, "which=True must be", ""),
        ({"format": "transformers"}, "Tied.., is not a transformers model", "pass model="),
        (
            {"format": "transformers", "model": Tied()},
            "model=Tied is not a transformers",
            "PreTrain",
        ),
        ({"model": Tied()}, "does not use model", "leave out model"),
    ],
)
def test_a_wrong_export_is_refused_and_writes_nothing(
    job: TrainingJob, tmp_path: Path, keys: dict[str, Any], message: str, hint: str
) -> None:
    commit(job, 10)

    with pytest.raises(ConfigError, match=message) as caught:
        job.export(tmp_path / "out", **keys)

    assert hint in caught.value.hint
    assert not (tmp_path / "out").exists()


def test_export_to_the_wrong_kind_of_path_is_refused(job: TrainingJob, tmp_path: Path) -> None:
    commit(job, 10)
    (tmp_path / "file").touch()

    with pytest.raises(ConfigError, match="is a folder; format='safetensors' writes one file"):
        job.export(tmp_path)
    with pytest.raises(ConfigError, match="is a file; format='transformers' writes a folder"):
        job.export(tmp_path / "file", format="transformers", model=as_hugging_face(10))


def test_missing_checkpoint_error_names_the_interval(job: TrainingJob, tmp_path: Path) -> None:
    for which in ("last", "best", 7):
        with pytest.raises(CheckpointError, match=r"has no weights to load: .* at the interval"):
            job.export(tmp_path / "out", which=which)


def test_error_for_an_unknown_step_suggests_the_nearest(job: TrainingJob, tmp_path: Path) -> None:
    for step in (10, 20, 30):
        commit(job, step)

    with pytest.raises(CheckpointError, match=r"no checkpoint at step 23; .* steps 20 and 30"):
        job.export(tmp_path / "out", which=23)


def test_corrupt_checkpoint_is_named_and_not_exported(job: TrainingJob, tmp_path: Path) -> None:
    store = commit(job, 10)
    spoil(store, 10)

    with pytest.raises(CheckpointError, match=r"step 10 of job tied-1 cannot be used: .*SHA-256"):
        job.export(tmp_path / "out", which=10)

    assert not (tmp_path / "out").exists()


def spoil(store: LocalStore, step: int) -> None:
    path = store.root / store.read_manifest(step).parts["model.safetensors"].key
    data = path.read_bytes()
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))


def test_error_for_an_incompatible_model_lists_names_and_shapes(job: TrainingJob) -> None:
    commit(job, 10)
    model = nn.ModuleDict({"embed": nn.Embedding(8, 4), "other": nn.Linear(4, 7)})

    with pytest.raises(CheckpointError) as caught:
        job.load_into(model)

    assert str(caught.value) == (
        "the checkpoint of tied-1 does not fit ModuleDict: different shape: embed.weight ((7, 4) "
        "in the checkpoint, (8, 4) in the model); not in the checkpoint: other.weight, other.bias; "
        "not in the model: out.bias, out.weight. The job trained Tied()."
    )


def as_hugging_face(step: int) -> Tied:
    """A model with what our code asks of a ``transformers`` model; the real one is tested too."""
    model: Any = model_of(step)
    model.config = SimpleNamespace(to_json_string=lambda: '{"model_type": "tied"}')
    model.save_pretrained = lambda folder: None
    return model  # type: ignore[no-any-return]


def test_folder_for_from_pretrained_keeps_its_other_files(job: TrainingJob, tmp_path: Path) -> None:
    commit(job, 10)
    folder = tmp_path / "tied"
    folder.mkdir()
    (folder / "tokenizer.json").write_text("{}")
    model = as_hugging_face(1)

    assert job.export(folder, format="transformers", model=model) == folder

    assert json.loads((folder / "config.json").read_text()) == {
        "architectures": ["Tied"],
        "model_type": "tied",
    }
    assert_weights(folder / "model.safetensors", 10)
    with pytest.raises(ConfigError, match=r"config.json already exists"):
        job.export(folder, format="transformers", model=model)
    job.export(folder, format="transformers", model=model, overwrite=True)
    assert (folder / "tokenizer.json").read_text() == "{}"


def test_the_config_of_another_model_is_refused(job: TrainingJob, tmp_path: Path) -> None:
    commit(job, 10)
    other = as_hugging_face(1)
    other.out = nn.Linear(4, 9)

    with pytest.raises(CheckpointError, match=r"does not fit Tied: different shape: out.bias"):
        job.export(tmp_path / "out", format="transformers", model=other)


def test_checkpoints_are_listed_with_the_newest_and_the_best(job: TrainingJob) -> None:
    assert job.checkpoints() == []
    for step in (10, 20, 30):
        store = commit(job, step)
    spoil(store, 30)
    marks = ("step", "generation", "is_newest", "is_best", "verified")

    quick = [[row[key] for key in marks] for row in job.checkpoints()]
    thorough = job.checkpoints(verify=True)

    assert quick == [
        [30, 3, True, False, False],
        [20, 3, False, False, False],
        [10, 3, False, True, False],
    ]
    assert [[row[key] for key in marks] for row in thorough] == [
        [30, 3, False, False, False],
        [20, 3, True, False, True],
        [10, 3, False, True, True],
    ]
    assert "was altered" in thorough[0]["problem"]
    assert thorough[1]["where"] == f"{job.record.folder}/checkpoints/step_00000020"


def test_checkpoint_removed_meanwhile_is_not_reported_as_broken(
    job: TrainingJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in (10, 20):
        store = commit(job, step)
    get_part = LocalStore.get_part

    def prune_first(self: LocalStore, part: Any) -> Path:
        store.prune([20])  # as the job does beside us
        return get_part(self, part)

    monkeypatch.setattr(LocalStore, "get_part", prune_first)

    rows = job.checkpoints(verify=True)

    assert [(row["step"], row["problem"]) for row in rows] == [(20, "")]


def test_newest_checkpoint_pruned_while_it_is_read_is_replaced_by_the_next(
    job: TrainingJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = commit(job, 10)
    get_part = LocalStore.get_part
    replaced: list[int] = []

    def replace_first(self: LocalStore, part: Any) -> Path:
        if not replaced:
            replaced.append(20)
            commit(job, 20)
            store.prune([20])
        return get_part(self, part)

    monkeypatch.setattr(LocalStore, "get_part", replace_first)

    assert torch.equal(job.state_dict()["out.bias"], model_of(20).out.bias)


def test_terminal_lists_and_exports(
    job: TrainingJob, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for step in (10, 20, 30):
        store = commit(job, step)
    (store.root / "manifests" / "step_00000020.json").write_text("{")
    runs = ["--runs", str(job.record.folder.parent)]

    assert main([*runs, "checkpoints", "tied", "--verify"]) == 0
    said = capsys.readouterr().out
    assert main([*runs, "export", str(tmp_path / "a"), "--job", "tied", "--best"]) == 0
    assert main([*runs, "export", str(tmp_path / "a"), "--job", "tied"]) == 2
    refused = capsys.readouterr().err
    assert main([*runs, "export", str(tmp_path / "b"), "--job", "tied", "--format", "safe"]) == 2

    lines = [line.split() for line in said.splitlines()]
    assert lines[0][:4] == ["3", "checkpoints", "of", "tied-1"]
    assert (lines[2][0], lines[2][-2:]) == ("30", ["newest", "whole"])
    assert lines[3] == ["20", "-", "-", "-", "-", "-", "broken"]
    assert (lines[4][0], lines[4][-2:]) == ("10", ["best", "whole"])
    assert said.splitlines()[5].startswith("step 20: step_00000020: its manifest is truncated")
    assert_weights(tmp_path / "a", 10)
    assert "--overwrite" in refused


def test_export_loads_no_torch(job: TrainingJob, tmp_path: Path) -> None:
    commit(job, 10)
    runs, path = job.record.folder.parent, tmp_path / "tied.safetensors"
    words = ["--runs", str(runs), "export", str(path), "--job", "tied"]
    code = f"import sys; from etrain_jupyter.cli import main; main({words!r}); "
    code += "print('torch' in sys.modules)"

    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT
    )

    assert done.stdout.splitlines()[-1] == "False"
    assert_weights(path, 10)
