"""Reinforcement learning with several agents (MADDPG): two agents must stand on two marks, one on each, without a word.

    python examples/functions/maddpg.py [--workers 1] [--rounds 6]

Each agent acts on what it sees alone; while they learn, its critic sees what both see and do. The marks are a mean distance of
0.4 at most from their nearest agent, where random moves leave them 0.9 away.
One worker is the default: in networks this small, more of them spend their time on communication.
Lowe et al., "Multi-Agent Actor-Critic for Mixed Cooperative-Competitive Environments", 2017.
"""

# test: tests/docs/test_functions_examples.py

import argparse
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from models import Mlp, init_params
from reinforcement import Spread, Transitions, play, stacked, with_target

from raysgd.functions import Deployer, Predictor, Trainer

NUM_EPISODES, NUM_SAMPLES, BATCH_SIZE = 64, 25_600, 128
DISCOUNT, NOISE = 0.9, 0.3
AGENTS = ("first", "second")
ACTOR: Any = Mlp((64, 64, 2), nn.relu, last_scale=0.01)
CRITIC: Any = Mlp((64, 64, 1), nn.relu)


def act_of(params, agent, observation):
    """Return the action of an agent on its own observation, from those of both."""
    own = observation[:, AGENTS.index(agent)]
    return jnp.tanh(ACTOR.apply({"params": params[agent]["actor"]}, own))


def act_together(params, observation):
    return jnp.stack([act_of(params, agent, observation) for agent in AGENTS], axis=1)


def value_of(params, agent, observation, action):
    """Return what the critic of an agent expects from what both see and do."""
    seen_and_done = jnp.concatenate([observation, action], axis=-1).reshape(len(observation), -1)
    return CRITIC.apply({"params": params[agent]["critic"]}, seen_and_done)[:, 0]


def loss_fn(train_rng, state, params, batch, is_training):
    online, target = params["online"], jax.lax.stop_gradient(params["target"])
    observation, action, next_observation = batch["observation"], batch["action"], batch["next_observation"]
    losses = jnp.zeros(len(observation))
    for number, agent in enumerate(AGENTS):
        future = value_of(target, agent, next_observation, act_together(target, next_observation))
        wanted = batch["reward"] + DISCOUNT * future
        losses += jnp.square(value_of(online, agent, observation, action) - wanted)
        own_action = action.at[:, number].set(act_of(online, agent, observation))
        losses -= value_of(jax.lax.stop_gradient(online), agent, observation, own_action)
    return losses.mean()


def pred_fn(pred_rng, params, batch, noise):
    """Play an episode for each row. Its number makes its start different from those of other rounds."""

    def act(rng, observation):
        action = act_together(params["online"], observation)
        return jnp.clip(action + noise * jax.random.normal(rng, action.shape), -1, 1), {}

    start_rng, play_rng = jax.random.split(jax.random.fold_in(pred_rng, batch["seed"].sum()))
    return play(act, Spread, play_rng, Spread.start(start_rng, len(batch["seed"])), Spread.max_steps)


def mean_distance(episodes: list[dict]) -> float:
    """Return the mean distance of a mark from its nearest agent, over all steps."""
    return -float(np.mean([episode["reward"] for episode in episodes])) / 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=6)
    args = parser.parse_args()

    online = {
        agent: {
            "actor": init_params(ACTOR, np.zeros((1, 8), np.float32), seed=2 * number),
            "critic": init_params(CRITIC, np.zeros((1, 20), np.float32), seed=2 * number + 1),
        }
        for number, agent in enumerate(AGENTS)
    }
    params = {"online": online, "target": online}

    with Deployer(jax_seed=0, num_workers=args.workers) as deployer:
        trainer = Trainer(
            deployer,
            collate_fn=stacked,
            loss_fn=loss_fn,
            params=params,
            optimizer=with_target(optax.adam(2e-3), rate=0.02),
        )
        predictors = {
            noise: Predictor(deployer, stacked, partial(pred_fn, noise=noise)) for noise in (NOISE, 10.0, 0.0)
        }

        def episodes_of(first_seed: int, noise: float) -> list[dict]:
            seeds = [{"seed": np.int32(first_seed + number)} for number in range(NUM_EPISODES)]
            return predictors[noise].predict(
                seeds, params=trainer.params, per_device_batch_size=NUM_EPISODES // args.workers
            )

        random_episodes = episodes_of(0, 10.0)  # so much noise that nothing but noise is left
        names = ["observation", "action", "reward", "next_observation"]
        memory, drawn = Transitions.of(random_episodes, names), np.random.default_rng(0)
        for number in range(1, args.rounds + 1):
            memory += Transitions.of(episodes_of(NUM_EPISODES * number, NOISE), names)
            sample = memory.sample(drawn, NUM_SAMPLES)
            trainer.fit(sample, per_device_batch_size=BATCH_SIZE // args.workers, n_epochs=1, save_last_ckpt=False)
        score = mean_distance(episodes_of(-NUM_EPISODES, 0.0))
    print(f"distance: {score:.3f} (random moves: {mean_distance(random_episodes):.3f})")


if __name__ == "__main__":
    main()
