"""A shuffle that is computed, not stored: any stretch of it, in any order, at no start-up cost and in constant memory.

A Feistel network permutes the numbers of ⌈log2 n⌉ bits; what comes out at n or above is put in again until it does not
("cycle walking"), which leaves a permutation of 0 … n-1. At most half of the numbers are outside, so that takes less
than two rounds through the network on average.

Sources: M. Luby, C. Rackoff, "How to construct pseudorandom permutations from pseudorandom functions", SIAM J. Comput.
17 (1988); J. Black, P. Rogaway, "Ciphers with arbitrary finite domains", CT-RSA 2002 (cycle walking, unequal halves);
the round function multiplies and shifts by SplitMix64's constants (G. Steele, D. Lea, C. Flood, OOPSLA 2014).
"""

import hashlib

import torch

ROUNDS = 10  # four are enough in theory, for round functions that are truly random

_FIRST, _SECOND = 0xBF58476D1CE4E5B9 - 2**64, 0x94D049BB133111EB - 2**64  # as signed numbers of 64 bits
_LARGEST = 2**62


class Permutation:
    """A permutation of 0 … n-1, chosen by a seed.

    Args:
        n: how many numbers, at most 2**62.
        seed: any number; another one gives another permutation.

    Raises:
        ValueError: `n` is negative or too large.

    Example:
        >>> shuffle = Permutation(10**12, seed=7)
        >>> first = shuffle(torch.arange(4))
        >>> torch.equal(first[2:], shuffle(torch.tensor([2, 3])))
        True
        >>> sorted(Permutation(5, seed=7)(torch.arange(5)).tolist())
        [0, 1, 2, 3, 4]
    """

    def __init__(self, n: int, seed: int) -> None:
        if not 0 <= n <= _LARGEST:
            raise ValueError(f"n={n}: it must be 0 to 2**62.")
        self.n = n
        bits = max(2, (n - 1).bit_length())
        self._right_bits = bits - bits // 2
        self._left_mask, self._right_mask = (1 << bits // 2) - 1, (1 << self._right_bits) - 1
        digest = hashlib.shake_256(f"distwrap permutation {seed}".encode()).digest(4 * ROUNDS)
        self._keys = [int.from_bytes(digest[4 * i : 4 * i + 4], "big") for i in range(ROUNDS)]

    def __call__(self, positions: torch.Tensor) -> torch.Tensor:
        """Return the permuted numbers at these positions.

        Args:
            positions: int64, of any shape, each from 0 to n-1.

        Returns:
            int64, of the same shape.
        """
        found = self._network(positions)
        outside = found >= self.n
        while bool(outside.any()):
            found[outside] = self._network(found[outside])
            outside = found >= self.n
        return found

    def _network(self, numbers: torch.Tensor) -> torch.Tensor:
        left, right = numbers >> self._right_bits, numbers & self._right_mask
        mixed, shifted = torch.empty_like(left), torch.empty_like(left)
        for i, key in enumerate(self._keys):
            half, other, mask = (right, left, self._left_mask) if i % 2 == 0 else (left, right, self._right_mask)
            torch.bitwise_xor(half, key, out=mixed)
            mixed.mul_(_FIRST)
            torch.bitwise_right_shift(mixed, 31, out=shifted)
            mixed.bitwise_xor_(shifted).mul_(_SECOND)
            other.bitwise_xor_(mixed.bitwise_right_shift_(33).bitwise_and_(mask))
        return (left << self._right_bits) | right
