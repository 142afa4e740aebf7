"""The door through which requests reach the directory on TransferQueue's controller: a sampler.

TransferQueue lets one sampler run on the controller's request thread, between two requests of anybody. A fetch with
``sampling_config={ARGUMENT: request}`` on the plane's reserved partition is answered by the directory that lives in it;
any other fetch is served as TransferQueue's own sequential sampler does. The answer travels as custom metadata of a row
that does not exist, since a sampler can return nothing but indexes.

All state lies in the reserved partition, none in the sampler: it may be registered again at any time, and what is
registered twice loses nothing.
"""

from __future__ import annotations

from typing import Any

from transfer_queue.sampler import BaseSampler

from .directory.requests import ARGUMENT, answer

__all__ = ["DirectorySampler"]

#: Index of the row that carries the answer. TransferQueue's own indexes begin at 0.
ANSWER = -1


class DirectorySampler(BaseSampler):  # type: ignore[misc]  # the base is untyped
    """Serves the directory's requests, and everybody else's as they came."""

    def has_cached_result(self, *args: Any, **kwargs: Any) -> bool:  # noqa: ARG002 - TransferQueue's signature
        """Tell TransferQueue not to wait for samples on our behalf."""
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
            return [], []  # unknown, or not as we know it: told by the empty answer
        partition.custom_meta[ANSWER] = {ARGUMENT: answer(partition.__dict__, request)}
        return [ANSWER], []
