"""Trainings as they are written for nnScaler 0.8: the keys of its examples and tests, with small models and data in their place.

Each has the flags with which it is made small enough for a test; ``nothing else`` of it is changed.
"""

from __future__ import annotations

_PARTS = "support.nnscaler_parts"
_MLP = f"""
model:
  type: {_PARTS}.MLP
  args: {{dim: 16, nlayers: 2}}
optimizer:
  type: torch.optim.Adam
  args: {{lr: 0.01}}
"""
_ROWS = f"""
dataset:
  type: {_PARTS}.SimpleDataset
  train_args: {{dim: 16, size: 100}}
  val_args: {{dim: 16, size: 10}}
"""
_EVERY_STEP = """
checkpoint: {keep_last_n_checkpoints: 30, every_n_train_steps: 1, save_type: deduped}
"""
_ONE = ("--compute_config.plan_ngpus", "1", "--compute_config.runtime_ngpus", "1")

FILES: dict[str, tuple[str, tuple[str, ...]]] = {
    "characters": (
        f"""
compute_config: {{plan_ngpus: 1, constant_folding: true, use_zero: false, use_end2end: true}}
init_env_fn: {_PARTS}.init_env
run_mode: run
pas_policy: autodist
micro_batch_size: 64
grad_accumulation_steps: 1
max_train_steps: 5000
max_val_steps: 200
val_every_n_train_steps: 250
enable_progress_bar: true
model:
  type: {_PARTS}.Gpt
  args:
    init_from: scratch
    n_layer: 2
    n_head: 6
    n_embd: 24
    dropout: 0.0
    bias: false
    block_size: 256
    meta_path: ./nanoGPT/data/shakespeare_char/meta.pkl
optimizer:
  type: torch.optim.AdamW
  args:
    lr: 1e-3
    betas:
    - 0.9
    - 0.99
    fused: true
  clip_gnorm: 0.0
lr_scheduler:
  type: {_PARTS}.Warmup
  args: {{warmup_iters: 100, learning_rate: 1e-3, lr_decay_iters: 5000, min_lr: 1e-4}}
  interval: step
dataset:
  type: {_PARTS}.Characters
  train_args: {{data_dir: ./nanoGPT/data/shakespeare_char, split: train, block_size: 256}}
  val_args: {{data_dir: ./nanoGPT/data/shakespeare_char, split: val, block_size: 256}}
checkpoint: {{keep_last_n_checkpoints: 10, every_n_train_steps: 250, save_type: deduped}}
hook:
  on_train_step_end: {_PARTS}.note_train_step
  on_val_step_end: {_PARTS}.note_val_step
""",
        ("--max_train_steps", "6"),
    ),
    "images": (
        f"""
compute_config: {{plan_ngpus: 1, constant_folding: false, use_zero: true, use_end2end: true}}
init_env_fn: {_PARTS}.init_env
run_mode: run
pas_policy: dp
micro_batch_size: 10
grad_accumulation_steps: 1
max_epochs: 3
enable_progress_bar: true
model:
  type: {_PARTS}.Vit
optimizer:
  type: torch.optim.AdamW
  args: {{lr: 2e-5, weight_decay: 0.01}}
  clip_gnorm: 1.0
lr_scheduler:
  type: {_PARTS}.linear_schedule
  args: {{num_warmup_steps: 0}}
  interval: step
dataset:
  type: {_PARTS}.images
  train_args: {{split: train}}
  val_args: {{split: val}}
dataloader:
  type: {_PARTS}.image_loader
  train_args:
    collate_fn: {_PARTS}.collate_images
    drop_last: false
checkpoint: {{keep_last_n_checkpoints: 10, every_n_epochs: 1, save_type: deduped}}
log:
  - type: nnscaler.cli.loggers.TensorBoardLogger
    args: {{name: logs/tb, root_dir: .}}
""",
        (),
    ),
    "variables": (
        f"""
vars: {{dim: 16, drop_last: true}}
compute_config: {{plan_ngpus: 4, runtime_ngpus: 100, constant_folding: true, use_zero: true, use_end2end: true}}
run_mode: run
pas_policy: tp
micro_batch_size: 2
global_batch_size: 8
max_epochs: 4
max_train_steps: 100
seed: 0
model:
  type: {_PARTS}.MLP
  args: {{dim: $(vars.dim), nlayers: 2}}
optimizer:
  type: torch.optim.Adam
  args: {{lr: 0.01}}
dataset:
  type: {_PARTS}.SimpleDataset
  train_args: {{dim: $(vars.dim), size: 100}}
  val_args: {{dim: $(vars.dim), size: 10}}
dataloader:
  train_args: {{drop_last: $(vars.drop_last)}}
  val_args: {{drop_last: $(vars.drop_last)}}
"""
        + _EVERY_STEP,
        (*_ONE, "--max_train_steps", "15"),
    ),
    "stream": (
        f"""
compute_config: {{plan_ngpus: 2, runtime_ngpus: 4, constant_folding: true, use_zero: true, use_end2end: true}}
run_mode: run
pas_policy: tp
micro_batch_size: 2
global_batch_size: 8
max_epochs: 4
max_train_steps: 100
seed: 0
dataset:
  type: {_PARTS}.StreamedRows
  train_args:
    split: train
    shuffle: false
    batch_size: $(micro_batch_size)
    replication: $(compute_config.plan_ngpus)
  val_args:
    split: val
    shuffle: false
    batch_size: $(micro_batch_size)
    replication: $(compute_config.plan_ngpus)
dataloader:
  type: {_PARTS}.StreamingLoader
  train_args: {{shuffle: false, drop_last: true}}
  val_args: $(dataloader.train_args)
"""
        + _MLP
        + _EVERY_STEP,
        (*_ONE, "--max_train_steps", "15"),
    ),
    "f16": (
        """
compute_config: {plan_ngpus: 1, constant_folding: true, use_zero: true, use_end2end: true}
run_mode: run
pas_policy: autodist
micro_batch_size: 2
global_batch_size: 8
max_epochs: 1
max_train_steps: 10
enable_progress_bar: false
precision: bf16
dataloader:
  train_args: {drop_last: true}
  val_args: {drop_last: true}
"""
        + _MLP
        + _ROWS
        + _EVERY_STEP,
        (),
    ),
    "submodules": (
        f"""
compute_config: {{plan_ngpus: 1, runtime_ngpus: 1, use_zero: true, zero_ngroups: 1, use_end2end: true}}
gen_reuse: override
broadcast_strategy: none
instance_name: instance
dummy_sample_gen_fn: {_PARTS}.images
micro_batch_size: 2
grad_accumulation_steps: 2
max_epochs: 2
enable_progress_bar: false
log_progress_every_n_train_steps: 10
seed: 0
debug: {{check_gradient_sync_cross_devices: true}}
model:
  type: {_PARTS}.MLP
  args: {{dim: 16, nlayers: 2}}
  parallel_modules:
  - type: {_PARTS}.Vit
    args: {{dim: 16, nlayers: 16}}
    forward_args_gen_fn: {_PARTS}.images
    pas_policy: tp
    compute_config: {{use_zero: false, constant_folding: false}}
optimizer:
  type: torch.optim.Adam
  args: {{lr: 0.01}}
  loss_reduction: sum
dataset_sampler:
  train_args: {{shuffle: false}}
dataloader:
  train_args: {{shuffle: false, drop_last: true}}
checkpoint:
  save_type: sharded
  every_n_train_steps: 8
  keep_last_n_checkpoints: 30
  resume_from: {{checkpoint: last, with_merged: true}}
hook:
  after_aggregate_train_step_outputs: {_PARTS}.note_aggregated
"""
        + _ROWS,
        (),
    ),
    "tokens": (
        f"""
instance_name: lite
run_mode: run
compute_config:
  plan_ngpus: 1
  runtime_ngpus: 1
  constant_folding: true
  use_zero: true
  use_end2end: true
  pas_config: {{mem_constraint: 64}}
pas_policy: autodist
broadcast_strategy: all
model:
  type: {_PARTS}.TokenLoss
  args: {{model_id: some/model}}
lr_scheduler:
  type: {_PARTS}.LinearWarmup
  args: {{warmup_steps: 10}}
  interval: step
optimizer:
  type: torch.optim.AdamW
  args: {{lr: 1e-5, betas: [0.9, 0.95], weight_decay: 0.0, fused: true}}
  clip_gnorm: 1.0
  loss_reduction: sum
  grad_reduction: per-token-mean
  aggregate_outputs_fn: {_PARTS}.sum_tokens
dataset:
  type: {_PARTS}.lines
  train_args: {{split: train}}
dataloader:
  train_args: {{drop_last: true}}
dataset_sampler:
  train_args: {{shuffle: true}}
checkpoint: {{every_n_train_steps: 1000, save_type: deduped, resume_from: last}}
log:
- type: nnscaler.cli.loggers.TensorBoardLogger
  args: {{name: lite, root_dir: ./runs}}
precision: bf16
max_epochs: 1
micro_batch_size: 4
grad_accumulation_steps: 8
seed: 0
""",
        (),
    ),
    "recomputation": (
        f"""
compute_config:
  plan_ngpus: 1
  runtime_ngpus: 1
  constant_folding: true
  use_zero: true
  use_end2end: true
  pas_config: {{recompute_modules: LlamaDecoderLayer, transient_mem_coef: 0.5}}
pas_policy: autodist
model:
  type: {_PARTS}.TokenLoss
  args: {{model_id: some/model, from_scratch: true, num_hidden_layers: 4}}
optimizer:
  type: torch.optim.AdamW
  args: {{lr: 2e-5, fused: true}}
  clip_gnorm: 1.0
dataset:
  type: {_PARTS}.lines
  train_args: {{dataset_path: ./bookcorpus-4096}}
dataloader:
  train_args:
    collate_fn: torch.utils.data.default_collate
    drop_last: true
checkpoint: {{every_n_epochs: 1, save_type: deduped, resume_from: null}}
log:
- type: nnscaler.cli.loggers.TensorBoardLogger
  args: {{name: demo, root_dir: runs}}
precision: bf16
grad_accumulation_steps: 8
max_train_steps: 10
seed: 0
""",
        (),
    ),
}
