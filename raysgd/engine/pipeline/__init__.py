"""Pipeline parallelism: models are split into stages, and micro-batches flow through them."""
