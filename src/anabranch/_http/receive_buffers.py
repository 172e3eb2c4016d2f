"""Memory for large answers, lent to a connection for one answer and given back.

A fresh megabyte for each answer would cost more in page faults than all the work on it; a megabyte kept by each
connection would cost memory that most never need. So connections own a small buffer each and borrow a large one from
here, last returned first.
"""

__all__ = ["ReceiveBuffers"]


class ReceiveBuffers:
    def __init__(self, kept_bytes_max: int) -> None:
        self._kept_bytes_max = kept_bytes_max
        self._kept_bytes = 0
        self._kept: list[bytearray] = []

    @property
    def kept_bytes(self) -> int:
        return self._kept_bytes

    def borrow(self, size: int) -> bytearray:
        """At least `size` bytes, their content of no meaning."""
        kept = self._kept
        for index in range(len(kept) - 1, -1, -1):
            if len(kept[index]) >= size:
                buffer = kept.pop(index)
                self._kept_bytes -= len(buffer)
                return buffer
        # Rounded up by an eighth, so that answers that grow a little each time do not each need a new one.
        return bytearray(size + (size >> 3))

    def give_back(self, buffer: bytearray) -> None:
        self._kept.append(buffer)
        self._kept_bytes += len(buffer)
        while self._kept_bytes > self._kept_bytes_max:
            self._kept_bytes -= len(self._kept.pop(0))
