"""The state of the training that a rank holds anyway, from which the next attempt starts. Worker side."""
