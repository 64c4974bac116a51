"""What runs in the workers of a pipeline: batches, compiled steps, and the loops of fit and predict. Its modules import JAX."""
