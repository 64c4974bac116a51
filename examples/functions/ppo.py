"""Reinforcement learning with PPO: balance a pole on a cart.

    python examples/functions/ppo.py [--workers 2] [--rounds 8]

In each round the predictor plays episodes on all workers, and the trainer learns from them. The pole stands for 150 of 200 steps
in the mean, where random pushes let it fall after 22.
Schulman et al., "Proximal Policy Optimization Algorithms", 2017.
"""

# test: tests/docs/test_functions_examples.py

import argparse
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from models import Mlp, init_params
from reinforcement import CartPole, Transitions, play, stacked

from raysgd.functions import Deployer, Predictor, Trainer

NUM_EPISODES, NUM_STEPS = 32, 128
DISCOUNT, TRACE, CLIP = 0.98, 0.95, 0.2
ACTOR: Any = Mlp((64, 64, 2), last_scale=0.01)
CRITIC: Any = Mlp((64, 64, 1))


def loss_fn(train_rng, state, params, batch, is_training):
    logits = ACTOR.apply({"params": params["actor"]}, batch["observation"])
    values = CRITIC.apply({"params": params["critic"]}, batch["observation"])[:, 0]
    log_probs = jax.nn.log_softmax(logits)
    chosen = jnp.take_along_axis(log_probs, batch["action"][:, None], axis=1)[:, 0]
    ratio = jnp.exp(chosen - batch["log_prob"])
    gains = jnp.minimum(ratio * batch["advantage"], jnp.clip(ratio, 1 - CLIP, 1 + CLIP) * batch["advantage"])
    entropy = -(jnp.exp(log_probs) * log_probs).sum(axis=1)
    return (-gains + 0.5 * jnp.square(values - batch["return"]) - 0.01 * entropy).mean()


def pred_fn(pred_rng, params, batch, num_steps, is_exploring):
    """Play an episode for each row, whose number makes its start different from those of other rounds."""

    def act(rng, observation):
        logits = ACTOR.apply({"params": params["actor"]}, observation)
        action = jax.random.categorical(rng, logits) if is_exploring else logits.argmax(-1)
        log_prob = jnp.take_along_axis(jax.nn.log_softmax(logits), action[:, None], axis=1)[:, 0]
        return action, {"log_prob": log_prob, "value": CRITIC.apply({"params": params["critic"]}, observation)[:, 0]}

    rng = jax.random.fold_in(pred_rng, batch["seed"].sum())
    start_rng, play_rng = jax.random.split(rng)
    episodes = play(act, CartPole, play_rng, CartPole.start(start_rng, len(batch["seed"])), num_steps)
    next_value = CRITIC.apply({"params": params["critic"]}, episodes["next_observation"])[..., 0]
    return {**episodes, "next_value": next_value}


def add_advantages(episode: dict) -> dict:
    """Add generalized advantage estimates, and the returns that the critic learns, to the steps of an episode."""
    advantages = np.zeros(len(episode["reward"]), np.float32)
    following = 0.0
    for step in reversed(range(len(advantages))):
        future = DISCOUNT * episode["next_value"][step] * (not episode["has_failed"][step])
        error = episode["reward"][step] + future - episode["value"][step]
        following = error + DISCOUNT * TRACE * following * (not episode["is_over"][step])
        advantages[step] = following
    returns = (advantages + episode["value"]).astype(np.float32)
    return {**episode, "advantage": advantages, "return": returns}


def examples_of(episodes: list[dict]) -> Transitions:
    episodes = [add_advantages(episode) for episode in episodes]
    advantages = np.concatenate([episode["advantage"] for episode in episodes])
    for episode in episodes:
        episode["advantage"] = (episode["advantage"] - advantages.mean()) / advantages.std()
    return Transitions.of(episodes, ["observation", "action", "log_prob", "advantage", "return"])


def steps_until_fall(episodes: list[dict]) -> float:
    """Return the mean number of steps of the first episode of each row."""
    return float(np.mean([np.argmax(episode["is_over"]) + 1 for episode in episodes]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=8)
    args = parser.parse_args()

    observation = np.zeros((1, 4), np.float32)
    params = {"actor": init_params(ACTOR, observation), "critic": init_params(CRITIC, observation)}

    with Deployer(jax_seed=0, num_workers=args.workers) as deployer:
        trainer = Trainer(deployer, collate_fn=stacked, loss_fn=loss_fn, params=params, optimizer=optax.adam(2e-3))
        explorer, player = (
            Predictor(
                deployer, collate_fn=stacked, pred_fn=partial(pred_fn, num_steps=num_steps, is_exploring=is_exploring)
            )
            for num_steps, is_exploring in ((NUM_STEPS, True), (CartPole.max_steps, False))
        )

        def episodes_of(predictor: Predictor, first_seed: int) -> list[dict]:
            seeds = [{"seed": np.int32(first_seed + number)} for number in range(NUM_EPISODES)]
            return predictor.predict(seeds, params=trainer.params, per_device_batch_size=NUM_EPISODES // args.workers)

        random_steps = None
        for number in range(args.rounds):
            episodes = episodes_of(explorer, NUM_EPISODES * number)
            random_steps = random_steps or steps_until_fall(episodes)
            trainer.fit(
                examples_of(episodes), per_device_batch_size=256 // args.workers, n_epochs=4, save_last_ckpt=False
            )
        steps = steps_until_fall(episodes_of(player, -NUM_EPISODES))
    print(f"steps: {steps:.1f} (random pushes: {random_steps:.1f})")


if __name__ == "__main__":
    main()
