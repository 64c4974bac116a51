"""Words as numbers, and ROUGE, for the examples of this folder."""

# test: tests/docs/test_functions_examples.py

from collections import Counter
from collections.abc import Iterable

import numpy as np

PAD, BEGIN, END = 0, 1, 2  # the first numbers of each vocabulary


class Vocabulary:
    """A tokenizer: one number for each word that is separated by spaces."""

    def __init__(self, texts: Iterable[str]) -> None:
        self.words = ["<pad>", "<begin>", "<end>", *sorted({word for text in texts for word in text.split()})]
        self.number_of = {word: number for number, word in enumerate(self.words)}

    def __len__(self) -> int:
        return len(self.words)

    def encode(self, texts: list[str], length: int, *, has_end: bool = False) -> np.ndarray:
        """Return (texts, length) numbers: each text after `BEGIN`, and before `END` if wanted, filled up with `PAD`."""
        ids = np.full((len(texts), length), PAD, np.int32)
        for row, text in zip(ids, texts, strict=True):
            numbers = [BEGIN, *(self.number_of[word] for word in text.split()), *([END] if has_end else [])]
            if len(numbers) > length:
                raise ValueError(f"{text!r} has {len(numbers)} numbers, more than {length}.")
            row[: len(numbers)] = numbers
        return ids

    def decode(self, ids: np.ndarray) -> list[str]:
        """Return the text of each row, up to its first `END`."""
        rows = []
        for row in ids.tolist():
            kept = row[: row.index(END)] if END in row else row
            rows.append(" ".join(self.words[number] for number in kept if number not in (PAD, BEGIN)))
        return rows


def rouge(predictions: list[str], references: list[str], rouge_types: list[str]) -> dict[str, float]:
    """Return the means of F1 scores: of common n-grams ("rouge1"), or of the longest common subsequence ("rougeL").

    Lin, "ROUGE: A Package for Automatic Evaluation of Summaries", 2004. Words are compared as they are, without stemming.
    """
    scores = {}
    for kind in rouge_types:
        size = kind.removeprefix("rouge")
        pairs = [
            (prediction.split(), reference.split())
            for prediction, reference in zip(predictions, references, strict=True)
        ]
        rows = [_lcs_f1(*pair) if size == "L" else _ngram_f1(*pair, int(size)) for pair in pairs]
        scores[kind] = float(np.mean(rows))
    return scores


def _ngram_f1(prediction: list[str], reference: list[str], size: int) -> float:
    found, wanted = (
        Counter(tuple(words[start : start + size]) for start in range(len(words) - size + 1))
        for words in (prediction, reference)
    )
    return _f1((found & wanted).total(), found.total(), wanted.total())


def _lcs_f1(prediction: list[str], reference: list[str]) -> float:
    lengths = [0] * (len(reference) + 1)
    for word in prediction:
        before = list(lengths)
        for column, other in enumerate(reference, 1):
            lengths[column] = before[column - 1] + 1 if word == other else max(before[column], lengths[column - 1])
    return _f1(lengths[-1], len(prediction), len(reference))


def _f1(common: int, num_found: int, num_wanted: int) -> float:
    return 2 * common / (num_found + num_wanted) if common else 0.0
