"""What strategies do to a model itself: precision, recomputation, blocks, DTensors, and its memory use."""
