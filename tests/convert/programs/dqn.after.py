"""Deep Q-learning, in the manner of the reinforcement-learning tutorial, on a cart that is to stay in the middle."""

import random
from collections import deque, namedtuple
from itertools import count

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from distwrap import agree, rank_zero_only, save, setup_process_group, wrap_model

setup_process_group()
print = rank_zero_only(print)

Transition = namedtuple('Transition', ('state', 'action', 'next_state', 'reward'))
random.seed(0)
torch.manual_seed(0)


class ReplayMemory(object):
    def __init__(self, capacity):
        self.memory = deque([], maxlen=capacity)

    def push(self, *args):
        self.memory.append(Transition(*args))

    def sample(self, batch_size):
        return random.sample(self.memory, batch_size)

    def __len__(self):
        return len(self.memory)


class DQN(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer1 = nn.Linear(2, 16)
        self.layer2 = nn.Linear(16, 2)

    def forward(self, x):
        return self.layer2(F.relu(self.layer1(x)))


class Env:
    def reset(self):
        self.s = np.random.uniform(-0.1, 0.1, 2).astype(np.float32)
        self.n = 0
        return self.s

    def step(self, a):
        self.s = self.s + np.float32([self.s[1] * .1, .1 if a else -.1])
        self.n += 1
        return self.s, 1.0, abs(self.s[0]) > 1, self.n > 30


env = Env()
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
policy_net = DQN().to(device)
target_net = DQN().to(device)
target_net.load_state_dict(policy_net.state_dict())
policy_net = wrap_model(policy_net)
optimizer = torch.optim.AdamW(policy_net.parameters(), lr=1e-3, amsgrad=True)
memory = ReplayMemory(1000)
steps_done = 0


def select_action(state):
    global steps_done
    steps_done += 1
    if random.random() > 0.3:
        with torch.no_grad():
            return policy_net(state).max(1).indices.view(1, 1)
    else:
        return torch.tensor([[random.randrange(2)]], device=device, dtype=torch.long)


def optimize_model():
    if len(memory) < 16:
        return
    batch = Transition(*zip(*memory.sample(16)))
    state_batch = torch.cat(batch.state)
    q = policy_net(state_batch).gather(1, torch.cat(batch.action))
    with torch.no_grad():
        nxt = target_net(torch.cat(batch.next_state)).max(1).values
    loss = nn.SmoothL1Loss()(q, (nxt * 0.9 + torch.cat(batch.reward)).unsqueeze(1))
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_value_(policy_net.parameters(), 100)
    optimizer.step()


for i_episode in range(10):
    state = torch.tensor(env.reset(), device=device).unsqueeze(0)
    # TODO(distwrap): no loader is seen to feed this loop, and all ranks may train on the same: shard_loader(loader), split(batch), or before it seed_everything(seed, apart=True)
    for t in count():
        action = select_action(state)
        observation, reward, terminated, truncated = env.step(action.item())
        next_state = torch.tensor(observation, device=device).unsqueeze(0)
        memory.push(state, action, next_state, torch.tensor([reward]))
        state = next_state
        optimize_model()
        tsd, psd = target_net.state_dict(), policy_net.state_dict()
        for key in psd:
            tsd[key] = psd[key] * 0.005 + tsd[key] * 0.995
        target_net.load_state_dict(tsd)
        if agree(terminated or truncated, "any"):
            print('episode', i_episode, t)
            break

print('Complete')
save(policy_net.state_dict(), 'dqn.pt')
