"""How many retries a client may afford.

A count of attempts bounds what one call does; it does not bound what all calls do together. With four attempts per slot
and three rounds per batch, a backend that slows down enough for calls to fail is asked twelve times as much, in the
very moment in which it can serve least, and stays down after the cause is gone. Small counts do not help either: they
give up on the rare fault that one more try would have cured. What tells the two apart is how *common* failure is, and
no single call can see that.

So retries are paid from one purse. Every user call puts in a fraction of a token, every wire request that is a retry
takes out a whole one. While faults are rare there is always enough and the attempt counts decide; when they are common
the purse runs dry, and the load on the backend stays near `1 + ratio` times the calls, whatever the counts say. A call
that cannot pay gives its original error to the caller. A small floor per second keeps clients with few calls able to
retry: one call an hour would otherwise have saved a fifth of a token for its fault.

Savings expire: tokens last for one to two windows. Otherwise a quiet afternoon would pay for a storm in the evening.

Sans-IO: `now` is in seconds on any monotonic clock. Layers share one budget, so slots and rounds pay from the same
purse.
"""

from __future__ import annotations

import math

# Five deposits of a fifth must pay for one retry, whatever their sum is in floating point.
_ROUNDING = 1e-9


class RetryBudget:
    """Tokens for retries: `ratio` of one per user call, and `floor_per_s` each second; begins with the floor saved up.

    Retries within any time t are at most ``ratio * (calls in t + calls in the two windows before)
    + floor_per_s * (window_s + t)``.

    Args:
        now: the time, in seconds.
        ratio: tokens per user call. A fifth: faults of up to one call in five are retried in full, a dead backend sees
            a fifth more load than without retries.
        floor_per_s: tokens per second that come without calls: enough for a client that makes a few calls a second to
            retry each of them, and nothing next to what a backend serves.
        window_s: how long tokens last, at least (twice as long at most), and how many seconds of the floor can be saved
            up. Ten seconds: a call that failed at its attempt timeout should still find what it put in.

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
        # Deposits are kept by window and not by call, so that a deposit is one addition.
        self._fresh = 0.0  # from calls in this window
        self._old = 0.0  # from calls in the window before
        self._turns_at = now + window_s
        self._reserve_per_s = floor_per_s
        self._reserve_cap = floor_per_s * window_s
        self._reserve = self._reserve_cap
        self._refilled_at = now

    def deposit(self, now: float) -> None:
        """Pay in for one user call; once per call, however many slots and rounds it has."""
        if now >= self._turns_at:
            self._turn(now)
        self._fresh += self._ratio

    def withdraw(self, now: float, tokens: int = 1) -> bool:
        """Pay for `tokens` wire requests that are retries: all of them (True) or none (False).

        ValueError if tokens is negative.
        """
        if tokens < 0:
            raise ValueError(f"tokens must not be negative, not {tokens}")
        if self.balance(now) + _ROUNDING < tokens:
            return False
        # What expires first is spent first; the floor lasts longest and stays for times with few calls.
        from_old = min(self._old, tokens)
        from_fresh = min(self._fresh, tokens - from_old)
        self._old -= from_old
        self._fresh -= from_fresh
        self._reserve = max(0.0, self._reserve - (tokens - from_old - from_fresh))
        return True

    def balance(self, now: float) -> float:
        """Tokens that could be withdrawn now."""
        if now >= self._turns_at:
            self._turn(now)
        if now > self._refilled_at:
            refilled = self._reserve + (now - self._refilled_at) * self._reserve_per_s
            self._reserve = min(self._reserve_cap, refilled)
            self._refilled_at = now
        return self._old + self._fresh + self._reserve

    def _turn(self, now: float) -> None:
        """Let the older window's tokens expire and begin a new window."""
        if now < self._turns_at + self._window_s:
            self._old = self._fresh
            self._turns_at += self._window_s
        else:  # nobody came for a whole window: the fresh ones are too old as well
            self._old = 0.0
            self._turns_at = now + self._window_s
        self._fresh = 0.0
