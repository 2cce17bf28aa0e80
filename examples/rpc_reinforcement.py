"""Reinforcement learning with one learner and several observers, who balance poles on carts.

    mpirun -n 3 python examples/rpc_reinforcement.py

Rank 0 owns the policy. Every other rank observes some carts: it sends their states to the learner and gets a push to
the left or to the right for each. The learner's method is an `async_execution` function: it waits, without holding a
thread, until the states of all observers are there, and computes all pushes in one pass of the policy. After an episode
the learner takes one step of REINFORCE (Williams, 1992), and the poles stand longer and longer. With one rank, that
rank is also the only observer.
"""

import argparse
import threading

import torch
from torch import Tensor, nn
from torch.distributions import Categorical
from torch.futures import Future

import hvlike as hvd
from hvlike import rpc


def main() -> None:
    """Join the job; rank 0 learns, the others observe when they are asked to."""
    options = parse_arguments()
    hvd.init()
    rpc.init_rpc(f"worker{hvd.rank()}")
    if hvd.rank() == 0:
        learn(options)
    rpc.shutdown()
    hvd.shutdown()


def learn(options: argparse.Namespace) -> None:
    """Create an observer on every other rank, then play and learn."""
    torch.manual_seed(options.seed)
    ranks = list(range(1, hvd.size())) or [0]
    learner = Learner(len(ranks), options.lr)
    reference = rpc.RRef(learner)
    carts = options.carts // len(ranks)
    observers = [
        rpc.remote(rank, Observer, args=(reference, place, carts, options.steps)) for place, rank in enumerate(ranks)
    ]
    for episode in range(options.episodes):
        rewards = torch.futures.wait_all([observer.rpc_async(timeout=0).play() for observer in observers])
        stood = torch.cat(rewards, dim=1)
        learner.learn(stood)
        if episode % 5 == 0 or episode == options.episodes - 1:
            print(f"episode {episode + 1}: {stood.sum(dim=0).mean():.1f} of {options.steps} steps upright", flush=True)
    print(f"{learner.rounds} passes of the policy for {learner.asked} questions", flush=True)


class Learner:
    """The policy; lives on rank 0, reached through an RRef."""

    def __init__(self, observers: int, lr: float) -> None:
        self.policy = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 2))
        self.optimizer = torch.optim.Adam(self.policy.parameters(), lr)
        self.observers = observers
        self.lock = threading.Lock()
        self.states: dict[int, Tensor] = {}
        self.answer: Future[list[Tensor]] = Future()
        self.log_probabilities: list[Tensor] = []
        self.rounds = self.asked = 0

    @staticmethod
    @rpc.functions.async_execution
    def choose(learner: rpc.RRef, place: int, states: Tensor) -> Future[Tensor]:
        """The pushes for an observer's carts: 0 is left, 1 is right. Answered when all observers have asked."""
        self = learner.local_value()
        with self.lock:
            answer = self.answer
            self.states[place] = states
            self.asked += 1
            complete = len(self.states) == self.observers
            if complete:
                ordered = torch.cat([self.states[each] for each in range(self.observers)])
                pushes = self.push(ordered).chunk(self.observers)
                self.states, self.answer = {}, Future()
        mine = answer.then(lambda done: done.wait()[place])
        # Completing the future sends the answers: not while the lock is held.
        if complete:
            answer.set_result(pushes)
        return mine

    def push(self, states: Tensor) -> Tensor:
        """Draw a push for every cart and keep its probability for learning."""
        self.rounds += 1
        choice = Categorical(logits=self.policy(states))
        pushes = choice.sample()
        self.log_probabilities.append(choice.log_prob(pushes))
        return pushes

    def learn(self, rewards: Tensor) -> None:
        """Make pushes that were followed by more reward than usual at their step more likely.

        rewards: (steps, carts), 1 while the pole stood.
        """
        returns = rewards.flip(0).cumsum(0).flip(0)
        standing = rewards.sum(dim=1, keepdim=True).clamp(min=1)
        advantage = rewards * (returns - (rewards * returns).sum(dim=1, keepdim=True) / standing)
        loss = -(torch.stack(self.log_probabilities) * advantage / (advantage.std() + 1e-6)).sum() / rewards.sum()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.log_probabilities.clear()


class Observer:
    """Some carts on one rank."""

    def __init__(self, learner: rpc.RRef, place: int, carts: int, steps: int) -> None:
        self.learner, self.place, self.carts, self.steps = learner, place, carts, steps
        self.draw = torch.Generator().manual_seed(place)

    def play(self) -> Tensor:
        """Play one episode. Returns (steps, carts): 1 where the pole stood after the step."""
        carts = Carts(self.carts, self.draw)
        rewards = []
        for _ in range(self.steps):
            asked = (self.learner, self.place, carts.states)
            rewards.append(carts.step(rpc.rpc_sync(self.learner.owner(), Learner.choose, args=asked)))
        return torch.stack(rewards)


class Carts:
    """Poles on carts that are pushed left or right (Barto, Sutton and Anderson, 1983), many at once.

    states: (carts, 4): position in m, speed in m/s, angle of the pole in rad, angular speed in rad/s.
    """

    SECONDS, GRAVITY, PUSH = 0.02, 9.8, 10.0
    CART, POLE, HALF_LENGTH = 1.0, 0.1, 0.5
    EDGE, STEEPEST = 2.4, 0.21

    def __init__(self, count: int, draw: torch.Generator) -> None:
        self.states = torch.rand(count, 4, generator=draw) * 0.1 - 0.05
        self.upright = torch.ones(count, dtype=torch.bool)

    def step(self, pushes: Tensor) -> Tensor:
        """Push every cart for a fiftieth of a second. Returns (carts,): 1 where the pole has stood all the time."""
        _, speed, angle, turn = self.states.unbind(dim=1)
        force = (pushes * 2 - 1) * self.PUSH
        mass, leverage = self.CART + self.POLE, self.POLE * self.HALF_LENGTH
        sine, cosine = angle.sin(), angle.cos()
        pull = (force + leverage * turn**2 * sine) / mass
        inertia = self.HALF_LENGTH * (4 / 3 - self.POLE * cosine**2 / mass)
        turn_rate = (self.GRAVITY * sine - cosine * pull) / inertia
        rate = pull - leverage * turn_rate * cosine / mass
        change = torch.stack([speed, rate, turn, turn_rate], dim=1) * self.SECONDS
        # A cart whose pole has fallen stays where it is.
        self.states = self.states + change * self.upright.unsqueeze(1)
        self.upright &= (self.states[:, 0].abs() < self.EDGE) & (self.states[:, 2].abs() < self.STEEPEST)
        return self.upright.float()


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--episodes", type=int, default=16)
    parser.add_argument("--steps", type=int, default=100, help="length of an episode")
    parser.add_argument("--carts", type=int, default=32, help="carts of all observers together")
    parser.add_argument("--lr", type=float, default=0.015)
    parser.add_argument("--seed", type=int, default=1)
    return parser.parse_args()


if __name__ == "__main__":
    main()
