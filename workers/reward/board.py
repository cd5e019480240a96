"""Shared memory of one reward process: what it is doing, readable at any moment without a word from it.

A sample that never ends cannot report, so the parent must see from outside which sample is in hand and since when. A
page of float64 does that for less than a microsecond a sample; a message per sample would cost about fifty.

Times are `time.monotonic` seconds, which all processes of a machine share. 0 means "not yet". Each value is one aligned
8-byte store, and the order of the stores per sample is started, score, ended.
"""

import mmap

CAPACITY = 256
"""Samples per chunk at most."""

SIZE = 8 * (1 + 3 * CAPACITY)
"""Bytes of the shared file."""


class Board:
    """Views of the shared file. `limit[0]`: the process begins no sample of its chunk from this index on."""

    def __init__(self, descriptor: int) -> None:
        self._map = mmap.mmap(descriptor, SIZE)
        values = memoryview(self._map).cast("d")
        self._views = [values[0:1], *(values[1 + i * CAPACITY : 1 + (i + 1) * CAPACITY] for i in range(3)), values]
        self.limit, self.started, self.ended, self.scores = self._views[:4]

    def clear(self, num_samples: int) -> None:
        """Prepare for a chunk; only while the process has none."""
        zeros = memoryview(bytes(8 * num_samples)).cast("d")
        self.started[:num_samples] = zeros
        self.ended[:num_samples] = zeros
        self.limit[0] = num_samples

    def close(self) -> None:
        """Release the views, then the memory."""
        for view in self._views:
            view.release()
        self._map.close()
