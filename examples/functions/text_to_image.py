"""Paint digits from words with a small diffusion model: "a handwritten seven" becomes a picture of 8 x 8 pixels.

    python examples/functions/text_to_image.py [--workers 2] [--epochs 15]

A classifier that was trained on real scans recognizes the digit of the prompt in at least 0.8 of the pictures; of noise, in 0.1.
The model predicts the clean picture, and samples as DDIM: Song, Meng, Ermon, "Denoising Diffusion Implicit Models", 2021.
"""

# test: tests/docs/test_functions_examples.py

import argparse
import random
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
from models import Denoiser, init_params
from scans import load_scans
from sklearn.svm import SVC
from texts import Vocabulary

from raysgd.functions import Deployer, Trainer

DIGITS = "zero one two three four five six seven eight nine".split()
LENGTH, NUM_PIXELS, NUM_STEPS = 6, 64, 30


def prompt_of(digit: int, drawn: random.Random) -> str:
    what = drawn.choice(["a handwritten", "a small grey", "the digit", "the number"])
    return f"{what} {DIGITS[digit]}"


def load_dataset() -> list[dict]:
    """Return scans of digits as pixels in [-1, 1], and a text for each."""
    images, labels = load_scans()
    drawn = random.Random(0)
    return [
        {"image": 2 * image - 1, "prompt": prompt_of(label, drawn)}
        for image, label in zip(images, labels.tolist(), strict=True)
    ]


def collate_fn(examples, vocabulary):
    blank = np.zeros(NUM_PIXELS, np.float32)  # a prompt without a picture: one to paint
    return {
        "ids": vocabulary.encode([example["prompt"] for example in examples], LENGTH),
        "images": np.stack([example.get("image", blank) for example in examples]),
    }


def signal_and_noise(times):
    """Return how much of the picture and of the noise there is at a time: 0 is the picture, 1 the noise."""
    return jnp.cos(times * jnp.pi / 2), jnp.sin(times * jnp.pi / 2)


def loss_fn(train_rng, state, params, batch, is_training, model):
    images = batch["images"]
    time_rng, noise_rng = jax.random.split(train_rng)
    times = jax.random.uniform(time_rng, (images.shape[0], 1))
    signal, noise = signal_and_noise(times)
    noisy = signal * images + noise * jax.random.normal(noise_rng, images.shape)
    painted = model.apply({"params": params}, noisy, times[:, 0], batch["ids"])
    return jnp.square(painted - images).mean()


def pred_fn(pred_rng, params, batch, model):
    num_rows = batch["ids"].shape[0]
    times = jnp.linspace(1, 0, NUM_STEPS + 1)

    def denoise(step, noisy):
        signal, noise = signal_and_noise(times[step])
        next_signal, next_noise = signal_and_noise(times[step + 1])
        painted = model.apply({"params": params}, noisy, jnp.full(num_rows, times[step]), batch["ids"])
        return next_signal * painted + next_noise * (noisy - signal * painted) / noise

    return jax.lax.fori_loop(0, NUM_STEPS, denoise, jax.random.normal(pred_rng, (num_rows, NUM_PIXELS)))


def output_fn(batch_preds):
    return [np.clip(picture, -1, 1) for picture in np.asarray(batch_preds)]


def as_text(pictures: list[np.ndarray]) -> str:
    """Return 8 x 8 pictures as lines of characters, one picture next to the other."""
    pixels = np.concatenate([picture.reshape(8, 8) for picture in pictures], axis=1)
    return "\n".join("".join(" .:-=+*#%@"[round(4.5 * (value + 1))] * 2 for value in line) for line in pixels)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=15)
    args = parser.parse_args()

    train_examples = load_dataset()
    drawn = random.Random(1)
    digits = np.arange(200) % 10
    prompts = [{"prompt": prompt_of(digit, drawn)} for digit in digits.tolist()]
    vocabulary = Vocabulary(example["prompt"] for example in train_examples)
    model = Denoiser(len(vocabulary))
    inputs = np.zeros((1, NUM_PIXELS), np.float32), np.zeros(1, np.float32), np.ones((1, LENGTH), np.int32)
    params = init_params(model, *inputs)

    with Deployer(jax_seed=0, num_workers=args.workers) as deployer:
        trainer = Trainer(
            deployer,
            collate_fn=partial(collate_fn, vocabulary=vocabulary),
            loss_fn=partial(loss_fn, model=model),
            params=params,
            optimizer=optax.adam(3e-3),
            params_sharding_rules=deployer.get_sharding_rules(params),
        )
        predictor = trainer.get_default_predictor(partial(pred_fn, model=model), output_fn)
        trainer.fit(train_examples, per_device_batch_size=64, n_epochs=args.epochs)
        pictures = predictor.predict(prompts, params=trainer.params, per_device_batch_size=100)

    print("zero to four:", as_text(pictures[:5]), sep="\n")
    images, labels = load_scans()
    judge = SVC().fit(2 * images - 1, labels)
    noise = np.random.default_rng(0).uniform(-1, 1, (len(digits), NUM_PIXELS))
    print(f"recognized: {judge.score(pictures, digits):.3f} (noise: {judge.score(noise, digits):.3f})")


if __name__ == "__main__":
    main()
