"""What runs in the workers: batches, compiled steps, and the loops of fit and predict. Its modules import JAX."""
