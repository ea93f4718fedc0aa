import torch
from torch import nn

import distwrap as dw

EPISODES, HORIZON, ITERATIONS = 24, 10, 6


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(2, 16)
        self.logits = nn.Linear(16, 3)

    def forward(self, obs):
        return self.logits(torch.tanh(self.body(obs))).log_softmax(-1)


def play(policy, position, gumbel):
    """Walk towards zero; the actions are left, stay and right."""
    speed, rewards, observations, actions = torch.zeros_like(position), [], [], []
    for t in range(HORIZON):
        obs = torch.stack([position, speed], dim=1)
        with torch.no_grad():
            action = (policy(obs) + gumbel[:, t]).argmax(1)
        speed = 0.5 * speed + 0.3 * (action - 1)
        position = position + speed
        observations.append(obs)
        actions.append(action)
        rewards.append(-position.abs())
    return torch.stack(observations, 1), torch.stack(actions, 1), torch.stack(rewards, 1)


@dw.distributed(seed=3)
def main():
    g = torch.Generator().manual_seed(17)
    policy = dw.wrap_model(Policy())
    optimizer = torch.optim.Adam(policy.parameters(), lr=0.02)
    for it in range(ITERATIONS):
        starts = torch.randn(EPISODES, generator=g) * 2
        gumbel = -torch.log(-torch.log(torch.rand(EPISODES, HORIZON, 3, generator=g)))
        obs, actions, rewards = play(policy, dw.split(starts), dw.split(gumbel))
        returns = rewards.flip(1).cumsum(1).flip(1)
        baseline = dw.mean(returns.mean(0), len(returns))
        log_probs = policy(obs).gather(2, actions[..., None]).squeeze(2)
        loss = -(log_probs * (returns - baseline)).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        score = dw.mean(rewards.sum(1).mean().item(), len(rewards))
    return score


if __name__ == "__main__":
    print(f"average return {main():.5f}")
