"""Scans of handwritten digits from scikit-learn, for the examples of this folder."""

# test: tests/docs/test_functions_examples.py

from typing import Any

import numpy as np
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split


def load_scans() -> tuple[np.ndarray, np.ndarray]:
    """Return 1,797 pictures of 8 x 8 pixels in [0, 1] as (rows, 64), and their digits."""
    scans: Any = load_digits()
    return scans.data.astype(np.float32) / 16, scans.target


def load_examples() -> tuple[list[dict], list[dict]]:
    """Return examples with an image and a label each, for training and for evaluation."""
    images, labels = load_scans()
    rows = [{"image": image, "label": label} for image, label in zip(images, labels.tolist(), strict=True)]
    parts: Any = train_test_split(rows, test_size=0.2, random_state=0, stratify=labels)
    return parts[0], parts[1]
