"""Reinforcement learning with DDPG: swing a pendulum up with a torque that is too weak to lift it at once.

    python examples/functions/ddpg.py [--workers 1] [--rounds 8]

An episode of 200 steps costs 400 at most in the mean, where random torques cost above 1000. Actor, critic and their targets,
which follow slowly, are one tree of parameters and one loss.
One worker is the default: in networks this small, more of them spend their time on communication.
Lillicrap et al., "Continuous Control with Deep Reinforcement Learning", 2016.
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
from reinforcement import Pendulum, Transitions, play, stacked, with_target

from raysgd.functions import Deployer, Predictor, Trainer

NUM_EPISODES, NUM_STEPS, NUM_SAMPLES, BATCH_SIZE = 16, 200, 25_600, 128
DISCOUNT, NOISE = 0.97, 0.3
ACTOR: Any = Mlp((64, 64, 1), nn.relu, last_scale=0.01)
CRITIC: Any = Mlp((64, 64, 1), nn.relu)


def act_of(params, observation):
    return jnp.tanh(ACTOR.apply({"params": params["actor"]}, observation))


def value_of(params, observation, action):
    return CRITIC.apply({"params": params["critic"]}, jnp.concatenate([observation, action], axis=1))[:, 0]


def loss_fn(train_rng, state, params, batch, is_training):
    online, target = params["online"], jax.lax.stop_gradient(params["target"])
    next_action = act_of(target, batch["next_observation"])
    wanted = batch["reward"] / 10 + DISCOUNT * value_of(target, batch["next_observation"], next_action)
    critic_loss = jnp.square(value_of(online, batch["observation"], batch["action"]) - wanted)
    fixed_critic = {"critic": jax.lax.stop_gradient(online["critic"])}
    actor_loss = -value_of(fixed_critic, batch["observation"], act_of(online, batch["observation"]))
    return (critic_loss + actor_loss).mean()


def pred_fn(pred_rng, params, batch, num_steps, noise):
    """Play an episode for each row. Its number makes its start different from those of other rounds."""

    def act(rng, observation):
        action = act_of(params["online"], observation)
        return jnp.clip(action + noise * jax.random.normal(rng, action.shape), -1, 1), {}

    start_rng, play_rng = jax.random.split(jax.random.fold_in(pred_rng, batch["seed"].sum()))
    return play(act, Pendulum, play_rng, Pendulum.start(start_rng, len(batch["seed"])), num_steps)


def mean_return(episodes: list[dict]) -> float:
    return float(np.mean([episode["reward"].sum() for episode in episodes]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=8)
    args = parser.parse_args()

    actor, critic = init_params(ACTOR, np.zeros((1, 3), np.float32)), init_params(CRITIC, np.zeros((1, 4), np.float32))
    online = {"actor": actor, "critic": critic}
    params = {"online": online, "target": online}

    with Deployer(jax_seed=0, num_workers=args.workers) as deployer:
        trainer = Trainer(
            deployer,
            collate_fn=stacked,
            loss_fn=loss_fn,
            params=params,
            optimizer=with_target(optax.adam(2e-3), rate=0.02),
        )

        def episodes_of(first_seed: int, num_steps: int, noise: float) -> list[dict]:
            predictor = predictors[num_steps, noise]
            seeds = [{"seed": np.int32(first_seed + number)} for number in range(NUM_EPISODES)]
            return predictor.predict(seeds, params=trainer.params, per_device_batch_size=NUM_EPISODES // args.workers)

        predictors = {
            settings: Predictor(deployer, stacked, partial(pred_fn, num_steps=settings[0], noise=settings[1]))
            for settings in [(NUM_STEPS, NOISE), (200, 10.0), (200, 0.0)]
        }
        random_episodes = episodes_of(0, 200, 10.0)  # so much noise that nothing but noise is left
        names = ["observation", "action", "reward", "next_observation"]
        memory, drawn = Transitions.of(random_episodes, names), np.random.default_rng(0)
        for number in range(1, args.rounds + 1):
            memory += Transitions.of(episodes_of(NUM_EPISODES * number, NUM_STEPS, NOISE), names)
            sample = memory.sample(drawn, NUM_SAMPLES)
            trainer.fit(sample, per_device_batch_size=BATCH_SIZE // args.workers, n_epochs=1, save_last_ckpt=False)
        score = mean_return(episodes_of(-NUM_EPISODES, 200, 0.0))
    print(f"return: {score:.0f} (random torques: {mean_return(random_episodes):.0f})")


if __name__ == "__main__":
    main()
