"""The areas of `make test-rest`: which tests of real processes go with which folders of the package."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from support.project import ROOT


@dataclass(frozen=True)
class Area:
    """A part of the tests that one change needs."""

    #: What a change of these touches, for CONTRIBUTING.md.
    sources: tuple[str, ...]
    #: Patterns of files below tests/.
    tests: tuple[str, ...]

    def files(self) -> list[Path]:
        """Return the files of tests, each once."""
        return sorted({path for pattern in self.tests for path in (ROOT / "tests").glob(pattern)})


AREAS: dict[str, Area] = {
    "service": Area(
        ("raysgd/trainer", "raysgd/session", "raysgd/callbacks", "raysgd/goodput", "raysgd/transport.py"),
        (
            "conformance/test_callbacks.py",
            "integration/test_callbacks_in_runs.py",
            "integration/test_class_api.py",
            "integration/test_connections.py",
            "integration/test_counts.py",
            "integration/test_dropped_trainers.py",
            "integration/test_errors.py",
            "integration/test_exported_metrics.py",
            "integration/test_functions_of_a_report.py",
            "integration/test_interrupt.py",
            "integration/test_live_table.py",
            "integration/test_local_use.py",
            "integration/test_loggers_in_runs.py",
            "integration/test_metric_names.py",
            "integration/test_run_files.py",
            "integration/test_strangers.py",
            "integration/test_speed_guards.py",
            "integration/test_trainer_runs.py",
            "integration/test_trace.py",
            "integration/test_why.py",
            "integration/test_worker_exits.py",
            "integration/test_notebook.py",
        ),
    ),
    "cluster": Area(
        ("raysgd/workers",),
        (
            "fault/test_out_of_memory.py",
            "integration/test_bare_environment.py",
            "integration/test_clusters_of_the_driver.py",
            "integration/test_gpus.py",
            "integration/test_named_gpus.py",
            "integration/test_preloaded_cluster.py",
            "integration/test_runtime_env.py",
            "integration/test_separate_disks.py",
            "integration/test_surroundings.py",
            "integration/test_versions.py",
            "integration/test_trainer_resources.py",
            "integration/test_two_nodes.py",
            "integration/test_two_trainers.py",
        ),
    ),
    "recovery": Area(
        ("raysgd/controller", "raysgd/testing"),
        (
            "fault/test_controller_death.py",
            "fault/test_detached.py",
            "fault/test_fault_plan.py",
            "fault/test_forming.py",
            "fault/test_gcs_death.py",
            "fault/test_hangs.py",
            "fault/test_live_habits.py",
            "fault/test_live_kills.py",
            "fault/test_live_shards.py",
            "fault/test_live_state.py",
            "fault/test_process_fuzz.py",
            "fault/test_stopped_processes.py",
            "fault/test_stragglers.py",
            "fault/test_worker_death.py",
        ),
    ),
    "elastic": Area(
        ("raysgd/controller/policies", "raysgd/workers/group", "raysgd/session/logical.py"),
        (
            "fault/test_draining_node.py",
            "fault/test_elastic.py",
            "fault/test_files_through_resizes.py",
            "fault/test_logical_workers.py",
            "fault/test_node_death.py",
            "fault/test_preemption.py",
            "fault/test_spares.py",
            "fault/test_weights_after_deaths.py",
            "integration/test_logical_workers.py",
        ),
    ),
    "checkpoint": Area(
        ("raysgd/checkpoint", "raysgd/controller/checkpoints"),
        (
            "conformance/test_storages*.py",
            "fault/test_damaged_checkpoint.py",
            "fault/test_half_written.py",
            "fault/test_memory_checkpoints.py",
            "fault/test_object_storage.py",
            "fault/test_s3.py",
            "integration/test_checkpoints.py",
            "integration/test_restore.py",
        ),
    ),
    "data": Area(
        ("raysgd/data",),
        (
            "fault/test_data_after_death.py",
            "integration/test_data_frameworks.py",
            "integration/test_data_in_runs.py",
            "integration/test_lazy_datasets.py",
        ),
    ),
    "nodes": Area(
        ("raysgd/workers/placement", "raysgd/workers/liveness"),
        (
            "fault/test_cut_cables.py",
            "fault/test_cut_moments.py",
            "fault/test_doctor_network.py",
            "fault/test_full_disks.py",
            "fault/test_lost_machines.py",
            "fault/test_random_cuts.py",
            "fault/test_slow_links.py",
            "fault/test_slurm_machines.py",
        ),
    ),
    "tune": Area(
        ("raysgd/tune_integration",),
        ("docs/test_tune_examples.py", "integration/test_tune*.py"),
    ),
    "backends": Area(
        ("raysgd/backends", "raysgd/torch", "raysgd/tensorflow", "raysgd/jax"),
        (
            "conformance/test_backends*.py",
            "docs/test_backend_examples.py",
            "fault/test_coordinators.py",
            "fault/test_fault_plan_torch.py",
            "fault/test_jax_shards.py",
            "fault/test_torch_*.py",
            "integration/test_horovod_runs.py",
            "integration/test_jax_*.py",
            "integration/test_keras.py",
            "integration/test_torch_mistakes.py",
            "integration/test_torch_processes.py",
            # What needs TensorFlow, which the gate does not install.
            "unit/test_data_labels.py",
            "unit/test_data_tensorflow.py",
            "unit/test_session_frameworks.py",
            "unit/test_tensorflow_*.py",
        ),
    ),
    "engine": Area(
        ("raysgd/engine",),
        (
            "docs/test_engine_examples.py",
            "fault/test_engine_*.py",
            "integration/test_engine_buffers.py",
            "integration/test_engine_doors.py",
            "integration/test_engine_export.py",
            "integration/test_engine_loops.py",
            "integration/test_engine_models.py",
            "integration/test_engine_pairs.py",
            "integration/test_engine_runs.py",
            "integration/test_engine_unfinished_steps.py",
            "integration/test_engine_weights.py",
        ),
    ),
    "parallel": Area(
        ("raysgd/engine/tensor_parallel", "raysgd/engine/pipeline", "raysgd/engine/planning"),
        (
            "fault/test_model_parallel_groups.py",
            "integration/test_engine_matrix.py",
            "integration/test_engine_parallel.py",
            "integration/test_engine_plan_*.py",
        ),
    ),
    "command": Area(
        ("raysgd/cli", "raysgd/runs", "raysgd/viewer"),
        (
            "docs/test_command.py",
            "docs/test_scripts.py",
            "integration/test_cli_*.py",
            "integration/test_torch_scripts.py",
            "integration/test_viewer_*.py",
        ),
    ),
    "declarative": Area(
        ("raysgd/declarative", "raysgd/train"),
        (
            "fault/test_live_loops.py",
            "integration/test_declarative_runs.py",
            "integration/test_fine_tuning.py",
            "integration/test_imported_trainings.py",
        ),
    ),
    "functions": Area(
        ("raysgd/functions",),
        (
            "docs/test_functions_examples.py",
            "fault/test_live_functions.py",
            "integration/test_functions_nnx.py",
            "integration/test_functions_redco_programs.py",
            "integration/test_functions_runs.py",
        ),
    ),
    "docs": Area(
        ("doc", "examples", "README.md"),
        (
            "docs/test_chaos.py",
            "docs/test_char_lm.py",
            "docs/test_cluster_files.py",
            "docs/test_coming_from.py",
            "docs/test_commands.py",
            "docs/test_digits.py",
            "docs/test_editors.py",
            "docs/test_examples.py",
            "docs/test_extending.py",
            "docs/test_job.py",
            "docs/test_large_dataset.py",
            "docs/test_reading.py",
            "docs/test_silence.py",
            "docs/test_site.py",
            "docs/test_slurm.py",
            "docs/test_snippets.py",
            "integration/test_benchmarks_run.py",
        ),
    ),
}
