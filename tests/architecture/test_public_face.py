"""The public names of raysgd are those listed here. A change of this list changes the API and belongs in the CHANGELOG."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
from collections import Counter

import pytest

import raysgd
from support.project import ROOT

#: The public names of each package. `raysgd` has its public packages in addition.
PUBLIC = {
    "raysgd": """
        Backend BackendConfig Callback Checkpoint CheckpointConfig Coordinator Engine EngineConfig EnvConfig Event
        FailureConfig Finetuner Histogram HorovodConfig Image
        JaxConfig NoneConfig PreTrainer Result ResultStream RunConfig RunInfo RunStatus SavedArray Stop TemplateSettings
        TensorflowConfig
        TorchConfig Trainer accelerate barrier broadcast compare_runs data_parallel_rank data_parallel_size device gather
        get_dataset get_datasets in_worker list_checkpoints live_state load_checkpoint load_run local local_rank local_world_size
        node_rank report save_checkpoint should_stop world_rank world_size
    """.split(),
    "raysgd.backends": """
        Backend BackendConfig Coordinator Member
    """.split(),
    "raysgd.callbacks": """
        Callback CsvCallback EarlyStoppingCallback JsonLinesCallback MLflowCallback PrintCallback ProgressCallback
        Stop TensorBoardCallback TorchProfilerCallback WandbCallback
    """.split(),
    "raysgd.data": """
        Batches DatasetShard DatasetSubset Rows WorkerDataset to_cv
    """.split(),
    "raysgd.engine": """
        Candidate EngineConfig Hardware MemoryEstimate MemoryUse Plan plan predict_memory
    """.split(),
    "raysgd.declarative": """
        AggregatedOutputs CheckpointConfig ComputeConfig DataloaderConfig DatasetConfig DatasetSamplerConfig HookConfig
        LRSchedulerConfig LogConfig ModelConfig OptimizerConfig TrainHook TrainerArgs evaluate export
        load_args merge_checkpoint train
    """.split(),
    "raysgd.declarative.sft": """
        CausalLM Conversations collate
    """.split(),
    "raysgd.functions": """
        Deployer FitResult Predictor StoredArray Trainer open_safetensors
    """.split(),
    "raysgd.torch": """
        PreparedLoader checksums device export logical_steps mesh prepare_data_loader prepare_model prepare_optimizer restore
        unwrap
    """.split(),
    "raysgd.tensorflow": """
        KerasCallback MultiWorkerMirroredStrategy
    """.split(),
    "raysgd.jax": """
        logical_steps mesh restore
    """.split(),
    "raysgd.tune_integration": """
        search trial_resources
    """.split(),
    "raysgd.errors": """
        AttemptEnded CheckpointCorruptError CheckpointError CheckpointNotFoundError CollectiveMismatchError ConfigError
        DataError InfeasibleError MetricError MissingMetricError RaySGDError ReshardError RunCancelledError SerializationError
        SessionError StartTimeoutError StorageError TrainFuncError TrainerBusyError TrainerClosedError UnknownArgumentError
        UnsafeStateError UsageError WorkerDiedError WorkerError WorkerTraceback
    """.split(),
    "raysgd.testing": """
        BitFlip ClusterState DiskFull Exit Fault FaultPlan Fired Hang HistoryError Kill KillDriver KillProcess
        KillTrainerActor LeakError NetworkCut OutOfMemory Preempt Raise RemoveNode Slow Stop StopProcess StorageFault
        TornWrite check_cluster check_history
    """.split(),
}
PACKAGES = [
    "backends", "callbacks", "data", "declarative", "engine", "errors", "jax", "functions", "tensorflow", "torch",
    "tune_integration",
]  # fmt: skip
FRAMEWORKS = {
    "raysgd.torch": "torch",
    "raysgd.engine": "torch",
    "raysgd.declarative.sft": "torch",
    "raysgd.jax": "jax",
    "raysgd.tensorflow": "tensorflow",
}


@pytest.mark.parametrize("package", PUBLIC)
def test_public_names_are_those_listed_here(package: str) -> None:
    if package in FRAMEWORKS:
        pytest.importorskip(FRAMEWORKS[package])
    module = importlib.import_module(package)
    expected = sorted([*PUBLIC[package], *(PACKAGES if package == "raysgd" else [])])
    assert sorted(module.__all__) == expected
    assert [name for name in expected if not hasattr(module, name)] == []


def test_every_public_name_has_one_stability_label() -> None:
    labelled = Counter()
    for page in (ROOT / "doc" / "reference").glob("*.md"):
        for row in re.findall(r"^\| (?:stable|beta) \| (.*) \|$", page.read_text(encoding="utf-8"), re.MULTILINE):
            labelled.update(re.findall(r"`([\w.]+)`", row))
    public = {f"{package}.{name}" for package, names in PUBLIC.items() for name in names}
    assert sorted(public ^ labelled.keys()) == []
    assert [name for name, count in labelled.items() if count > 1] == []


@pytest.mark.parametrize("package", PUBLIC)
def test_dir_lists_the_public_names(package: str) -> None:
    module = importlib.import_module(package)
    assert set(module.__all__) <= set(dir(module))


@pytest.mark.parametrize(
    ("name", "advice"), [("trainr", "did you mean 'Trainer'?"), ("ScalingConfig", "give num_workers="), ("zzz", "")]
)
def test_unknown_name_is_an_attribute_error_with_the_right_name(name: str, advice: str) -> None:
    with pytest.raises(AttributeError) as caught:
        getattr(raysgd, name)
    assert repr(name) in str(caught.value) and advice in str(caught.value)


def test_star_import_works() -> None:
    done = subprocess.run(
        [sys.executable, "-c", "from raysgd import *; Trainer, report"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
