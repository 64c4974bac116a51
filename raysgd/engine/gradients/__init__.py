"""The gradients of an optimizer's step: accumulated, averaged over ranks, clipped."""
