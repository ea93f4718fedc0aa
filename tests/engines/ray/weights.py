"""The weights that the ranks of a cluster are to end with."""

from __future__ import annotations

import torch

from tests.engines.regression import net, trained


def one_process() -> dict[str, torch.Tensor]:
    """Return the weights of one process in plain torch."""
    model = net()
    trained(model, torch.optim.Adam(model.parameters(), lr=0.05))
    return model.state_dict()


def assert_close(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """Compare weights of float32."""
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=1e-5, msg=name)
