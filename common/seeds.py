"""Seeds as pure functions of names, so that a restart or another worker draws the same numbers."""

import xxhash


def seed_of(*names: int | str) -> int:
    """Return a non-negative 63-bit seed that depends on every name and on their order."""
    return xxhash.xxh3_64_intdigest("\x1f".join(map(str, names)).encode()) >> 1
