"""The sampler by which requests reach the directory on TransferQueue's controller.

TransferQueue runs one sampler on the controller's request thread. A fetch with ``sampling_config={ARGUMENT: request}``
on the plane's reserved partition is answered by the directory that is stored in that partition; any other fetch is
served as by TransferQueue's sequential sampler. A sampler can return only indexes, so the answer is sent as custom
metadata of a row that does not exist.

All state is in the reserved partition and none in the sampler, so that the sampler can be registered again at any time.
"""

from __future__ import annotations

from typing import Any

from transfer_queue.sampler import BaseSampler

from ..directory.requests import ARGUMENT, answer

__all__ = ["DirectorySampler"]

#: Index of the row whose metadata carries the answer. TransferQueue's own indexes start at 0.
ANSWER = -1


class DirectorySampler(BaseSampler):  # type: ignore[misc]  # the base is untyped
    """Answers requests to the directory, and samples sequentially for all other fetches."""

    def has_cached_result(self, *args: Any, **kwargs: Any) -> bool:  # noqa: ARG002 - TransferQueue's signature
        """Return a value that keeps TransferQueue from waiting for samples before it calls :meth:`sample`."""
        return False

    def sample(
        self, ready_indexes: list[int], batch_size: int, *args: Any, partition: Any = None, **kwargs: Any
    ) -> tuple[list[int], list[int]]:
        """Answer a request, or choose the first ``batch_size`` ready indexes."""
        del args
        request = kwargs.get(ARGUMENT)
        if request is None:
            chosen = ready_indexes[:batch_size] if len(ready_indexes) >= batch_size else []
            return chosen, list(chosen)
        if not (hasattr(partition, "__dict__") and isinstance(getattr(partition, "custom_meta", None), dict)):
            return [], []  # no partition, or an unknown kind of partition: the client recognises the empty answer
        partition.custom_meta[ANSWER] = {ARGUMENT: answer(partition.__dict__, request)}
        return [ANSWER], []
