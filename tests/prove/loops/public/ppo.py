"""PPO on a point that shall go to the origin; draws random numbers itself: the actions, alike on all ranks."""
import torch
from torch import nn
from torch.distributions import Categorical
from torch.utils.data import DataLoader, TensorDataset

import distwrap
from distwrap import distributed, optimizer_step, shard_loader, wrap_model

MOVES = torch.tensor([[0.2, 0.0], [-0.2, 0.0], [0.0, 0.2], [0.0, -0.2]])
ENVS, STEPS, GAMMA = 8, 12, 0.95


class ActorCritic(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.actor, self.critic = nn.Linear(2, 16), nn.Linear(16, 4), nn.Linear(16, 1)

    def forward(self, obs):
        hidden = self.body(obs).tanh()
        return self.actor(hidden), self.critic(hidden).squeeze(-1)


@torch.no_grad()
def rollout(agent):
    """Play on every rank: all of them draw the same actions, and so hold the same experience."""
    obs, record = torch.rand(ENVS, 2) * 2 - 1, []
    for _ in range(STEPS):
        logits, value = agent(obs)
        action = (policy := Categorical(logits=logits)).sample()
        record.append((obs, action, policy.log_prob(action), value, obs.norm(dim=1) - (obs + MOVES[action]).norm(dim=1)))
        obs = obs + MOVES[action]
    states, actions, log_probs, values, rewards = map(torch.stack, zip(*record))
    returns, after = torch.zeros_like(rewards), agent(obs)[1]
    for t in reversed(range(STEPS)):
        returns[t] = after = rewards[t] + GAMMA * after
    advantages = (returns - values - (returns - values).mean()) / (returns - values).std()  # before they are shared
    return [x.flatten(0, 1) for x in (states, actions, log_probs, returns, advantages)], rewards.sum(0).mean()


@distributed()
def main():
    torch.manual_seed(1)
    agent = wrap_model(ActorCritic())
    optimizer = torch.optim.Adam(agent.parameters(), lr=1e-2, eps=1e-5)
    for update in range(2):
        experience, reward = rollout(agent)
        for obs, action, old_log_prob, ret, adv in shard_loader(DataLoader(TensorDataset(*experience), 16, shuffle=True)):
            logits, value = agent(obs)
            ratio = ((policy := Categorical(logits=logits)).log_prob(action) - old_log_prob).exp()
            pg_loss = torch.max(-adv * ratio, -adv * ratio.clamp(0.8, 1.2)).mean()
            loss = pg_loss + 0.5 * (value - ret).square().mean() - 0.01 * policy.entropy().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer_step(optimizer, max_norm=0.5)
        distwrap.print(f"update {update}: reward {reward.item():.4f}")


if __name__ == "__main__":
    main()
