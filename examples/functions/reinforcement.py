"""Environments in JAX, and what the examples of reinforcement learning in this folder share.

An environment is a few pure functions, so that a `pred_fn` plays many episodes at once, on all workers. States are arrays (rows,
...), one row for each episode.
"""

# test: tests/docs/test_functions_examples.py

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax


def play(act, env, rng, state, num_steps):
    """Play episodes, and return what happened as a dict of arrays (rows, steps, ...).

    Args:
        act: Returns actions and a dict of what else to record, for a random key and observations.
        env: One of the classes below.
        rng: The random key.
        state: The states at the beginning.
        num_steps: How many steps are played. Where an episode ends before, the next one begins.
    """

    def step(carried, rng):
        state, age = carried
        act_rng, start_rng = jax.random.split(rng)
        observation = env.observe(state)
        action, recorded = act(act_rng, observation)
        next_state, reward, has_failed = env.step(state, action)
        next_age = age + 1
        is_over = has_failed | (next_age >= env.max_steps)
        record = {
            "observation": observation,
            "action": action,
            "reward": reward,
            "next_observation": env.observe(next_state),
            "has_failed": has_failed,
            "is_over": is_over,
            **recorded,
        }
        fresh = env.start(start_rng, len(age))
        state = jnp.where(is_over.reshape(-1, *[1] * (state.ndim - 1)), fresh, next_state)
        return (state, jnp.where(is_over, 0, next_age)), record

    carried = state, jnp.zeros(len(state), jnp.int32)
    records = jax.lax.scan(step, carried, jax.random.split(rng, num_steps))[1]
    return jax.tree.map(lambda array: array.swapaxes(0, 1), records)


class CartPole:
    """Keep a pole upright on a cart that is pushed left (0) or right (1). The state is (position, speed, angle, turn).

    Barto, Sutton, Anderson, "Neuronlike Adaptive Elements That Can Solve Difficult Learning Control Problems", 1983.
    """

    max_steps = 200

    @staticmethod
    def start(rng, num_rows):
        return jax.random.uniform(rng, (num_rows, 4), minval=-0.05, maxval=0.05)

    @staticmethod
    def observe(state):
        return state

    @staticmethod
    def step(state, action):
        speed, angle, turn = state[:, 1:].T
        sin, cos = jnp.sin(angle), jnp.cos(angle)
        push = (jnp.where(action == 1, 10.0, -10.0) + 0.05 * turn**2 * sin) / 1.1
        turned = (9.8 * sin - cos * push) / (0.5 * (4 / 3 - 0.1 * cos**2 / 1.1))
        pushed = push - 0.05 * turned * cos / 1.1
        next_state = state + 0.02 * jnp.stack([speed, pushed, turn, turned], axis=1)
        has_failed = (jnp.abs(next_state[:, 0]) > 2.4) | (jnp.abs(next_state[:, 2]) > 0.2095)
        return next_state, jnp.ones(len(state)), has_failed


class Pendulum:
    """Swing a pendulum up and hold it, by a torque in [-1, 1] that is too weak to lift it at once. The state is (angle, turn)."""

    max_steps = 200

    @staticmethod
    def start(rng, num_rows):
        bounds = jnp.array([jnp.pi, 1.0])
        return jax.random.uniform(rng, (num_rows, 2), minval=-bounds, maxval=bounds)

    @staticmethod
    def observe(state):
        angle, turn = state.T
        return jnp.stack([jnp.cos(angle), jnp.sin(angle), turn / 8], axis=1)

    @staticmethod
    def step(state, action):
        angle, turn = state.T
        torque = 2 * jnp.clip(action[:, 0], -1, 1)
        from_top = (angle + jnp.pi) % (2 * jnp.pi) - jnp.pi
        cost = from_top**2 + 0.1 * turn**2 + 0.001 * torque**2
        turn = jnp.clip(turn + 0.05 * (15 * jnp.sin(angle) + 3 * torque), -8, 8)
        return jnp.stack([angle + 0.05 * turn, turn], axis=1), -cost, jnp.zeros(len(state), bool)


class Spread:
    """Two agents must stand on two marks, one on each. The state is (4, 2): the places of the agents, and of the marks.

    The cooperative navigation of Lowe et al., 2017, with two agents that move at once by their actions in [-1, 1].
    """

    max_steps = 25

    @staticmethod
    def start(rng, num_rows):
        return jax.random.uniform(rng, (num_rows, 4, 2), minval=-1, maxval=1)

    @staticmethod
    def observe(state):
        """Return (rows, agents, 8): of each agent, its place, and where the other agent and the marks are from there."""
        agents = state[:, :2]
        others, marks = agents[:, ::-1] - agents, state[:, None, 2:] - agents[:, :, None]
        return jnp.concatenate([agents, others, marks.reshape(*agents.shape[:2], 4)], axis=-1)

    @staticmethod
    def step(state, action):
        agents = jnp.clip(state[:, :2] + 0.2 * jnp.clip(action, -1, 1), -1.5, 1.5)
        next_state = jnp.concatenate([agents, state[:, 2:]], axis=1)
        distances = jnp.linalg.norm(agents[:, :, None] - state[:, None, 2:], axis=-1)
        reward = -distances.min(axis=1).sum(axis=1)  # of the nearest agent from each mark
        return next_state, reward, jnp.zeros(len(state), bool)


class Transitions(Sequence):
    """The steps of episodes as a sequence of examples, kept as one array for each name, so that workers get them fast."""

    def __init__(self, columns: dict[str, np.ndarray]) -> None:
        self.columns = columns

    @classmethod
    def of(cls, episodes: list[dict], names: list[str]) -> "Transitions":
        return cls({name: np.concatenate([episode[name] for episode in episodes]) for name in names})

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))

    def __getitem__(self, row: Any) -> Any:
        return {name: column[row] for name, column in self.columns.items()}

    def __add__(self, other: "Transitions") -> "Transitions":
        return Transitions({name: np.concatenate([self.columns[name], other.columns[name]]) for name in self.columns})

    def sample(self, drawn: np.random.Generator, number: int) -> "Transitions":
        rows = drawn.integers(len(self), size=number)
        return Transitions({name: column[rows] for name, column in self.columns.items()})


def stacked(examples: list[dict]) -> dict:
    """Return the batch of examples that have arrays of the same shape."""
    return {name: np.stack([example[name] for example in examples]) for name in examples[0]}


def with_target(optimizer, rate):
    """Make an optimizer for ``{"online": params, "target": params}``, whose target follows slowly by a moving average."""

    def init(params):
        return optimizer.init(params["online"])

    def update(updates, state, params=None):
        online, target = params["online"], params["target"]
        changes, state = optimizer.update(updates["online"], state, online)
        moves = jax.tree.map(lambda old, change, slow: rate * (old + change - slow), online, changes, target)
        return {"online": changes, "target": moves}, state

    return optax.GradientTransformation(init, update)
