"""The retry budget: limits the retries of all calls of a client together.

A maximum number of attempts limits one call, not all calls together. With four attempts per slot and three rounds per
batch, a backend that slows down enough for calls to fail gets twelve times as many requests, at the moment at which it
can serve least, and stays overloaded after the cause is gone. Fewer attempts do not help: they give up on rare faults
that one more attempt would have survived. The difference is how *common* failures are, which no single call can see.

So all retries take tokens from one budget. Every user call deposits a fraction of a token; every request that is a
retry withdraws a whole one. While faults are rare there are always enough tokens, and the attempt limits decide. When
faults are common the budget is exhausted, and the load on the backend stays near `1 + ratio` times the calls, whatever
the attempt limits are. A call that gets no token raises its original error. A small number of tokens per second, the
floor, lets clients with few calls retry: one call an hour would otherwise have only a fifth of a token for its fault.

Tokens expire after one to two windows, so that a quiet period does not allow a burst of retries much later.

Sans-IO: `now` is in seconds on any monotonic clock. All layers share one budget, so retries of slots and of rounds take
from the same tokens.
"""

from __future__ import annotations

import math

# Five deposits of a fifth must add up to one retry in spite of floating-point rounding.
_ROUNDING = 1e-9


class RetryBudget:
    """Holds tokens for retries: `ratio` tokens per user call and `floor_per_s` per second; starts with a full floor.

    Retries within any time t are at most ``ratio * (calls in t + calls in the two windows before)
    + floor_per_s * (window_s + t)``.

    Args:
        now: Current time, in seconds.
        ratio: Tokens per user call. A fifth by default: if up to one call in five fails, all are retried, and a dead
            backend gets a fifth more load than without retries.
        floor_per_s: Tokens per second that come without calls: enough for a client that makes a few calls a second to
            retry each of them, and negligible for a backend.
        window_s: Seconds that tokens last at least (at most twice as long), and for which the floor accumulates. Ten by
            default: a call that failed at its attempt timeout should still find the tokens that it deposited.

    Raises:
        ValueError: ratio or floor_per_s is negative or not finite, or window_s is not positive and finite.

    """

    __slots__ = (
        "_fresh",
        "_old",
        "_ratio",
        "_refilled_at",
        "_reserve",
        "_reserve_cap",
        "_reserve_per_s",
        "_turns_at",
        "_window_s",
    )

    def __init__(self, now: float, *, ratio: float = 0.2, floor_per_s: float = 10.0, window_s: float = 10.0) -> None:
        for name, number in (("ratio", ratio), ("floor_per_s", floor_per_s), ("window_s", window_s)):
            if not (math.isfinite(number) and number >= 0):
                raise ValueError(f"{name} must be finite and not negative, not {number!r}")
        if not window_s:
            raise ValueError("window_s must be positive")
        self._ratio = ratio
        self._window_s = window_s
        # Deposits are summed per window instead of stored per call, so that a deposit is one addition.
        self._fresh = 0.0  # from calls in this window
        self._old = 0.0  # from calls in the window before
        self._turns_at = now + window_s
        self._reserve_per_s = floor_per_s
        self._reserve_cap = floor_per_s * window_s
        self._reserve = self._reserve_cap
        self._refilled_at = now

    def deposit(self, now: float) -> None:
        """Deposit the tokens of one user call; called once per call, however many slots and rounds it has."""
        if now >= self._turns_at:
            self._next_window(now)
        self._fresh += self._ratio

    def withdraw(self, now: float, tokens: int = 1) -> bool:
        """Withdraw the tokens for that many retries and return True; if there are too few, take none and return False.

        Raises ValueError if tokens is negative.
        """
        if tokens < 0:
            raise ValueError(f"tokens must not be negative, not {tokens}")
        if self.balance(now) + _ROUNDING < tokens:
            return False
        # Tokens that expire first are taken first; the floor lasts longest and is kept for times with few calls.
        from_old = min(self._old, tokens)
        from_fresh = min(self._fresh, tokens - from_old)
        self._old -= from_old
        self._fresh -= from_fresh
        self._reserve = max(0.0, self._reserve - (tokens - from_old - from_fresh))
        return True

    def balance(self, now: float) -> float:
        """Return the number of tokens that could be withdrawn now."""
        if now >= self._turns_at:
            self._next_window(now)
        if now > self._refilled_at:
            refilled = self._reserve + (now - self._refilled_at) * self._reserve_per_s
            self._reserve = min(self._reserve_cap, refilled)
            self._refilled_at = now
        return self._old + self._fresh + self._reserve

    def _next_window(self, now: float) -> None:
        """Expire the tokens of the older window and begin a new one."""
        if now < self._turns_at + self._window_s:
            self._old = self._fresh
            self._turns_at += self._window_s
        else:  # there was no call for a whole window, so the fresh tokens have expired too
            self._old = 0.0
            self._turns_at = now + self._window_s
        self._fresh = 0.0
