"""BatchRetry: keeps the rows that were read and retries, in rounds, those that failed with a retryable error."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from asyncdp.calls import CallContext, GetSamples, handles
from asyncdp.compose.reads import partial_read
from asyncdp.errors import DataPlaneError, DataPlaneNotReady, PartialReadError
from asyncdp.meta import KVBatchMeta, RowHandle
from asyncdp.rows.block import Block, FieldSpec, assemble
from asyncdp.service import Layer
from asyncdp.settings.names import named

from .policy.backoff import Backoff
from .policy.rounds import Rounds

if TYPE_CHECKING:
    from tensordict import TensorDict

    from asyncdp.service import Service

__all__ = ["BatchRetry"]


class BatchRetry(Layer):
    """Reads a batch over several rounds; each further round requests only the rows whose error is retryable.

    A round costs one token of the retry budget for locating the rows and one for each host that failed. If the budget
    has too few tokens, the rows read so far are raised in a PartialReadError, with the errors of the others.

    Args:
        inner: The next layer.
        max_rounds: Number of rounds, the first included. 3 by default: each round has attempts on several ports.
        round_backoff_base_s: Upper bound, in seconds, of the wait before the second round; doubled for the third.
        round_backoff_cap_s: Upper bound of all waits, in seconds.
    """

    def __init__(
        self,
        inner: Service,
        *,
        max_rounds: int = 3,
        round_backoff_base_s: float = 0.1,
        round_backoff_cap_s: float = 2.0,
    ) -> None:
        """Check and store the settings."""
        super().__init__(inner)
        if max_rounds < 1:
            msg = f"max_rounds must be at least 1, not {max_rounds}"
            raise ValueError(msg)
        self.max_rounds = max_rounds
        with named(base_s="round_backoff_base_s", cap_s="round_backoff_cap_s"):
            self.backoff = Backoff(round_backoff_base_s, round_backoff_cap_s)

    @handles(GetSamples)
    async def get(self, call: GetSamples, ctx: CallContext) -> TensorDict:
        """Read the rows; start further rounds only if some of them failed."""
        try:
            return await self.inner.execute(call, ctx)
        except PartialReadError as err:
            if self.max_rounds == 1 or not err.retryable:
                raise
            first = err
        return await self._more(call, ctx, first)

    async def _more(self, call: GetSamples, ctx: CallContext, first: PartialReadError) -> TensorDict:
        n = len(call.sample_ids)
        rounds: Rounds[DataPlaneError] = Rounds(n, self.max_rounds)
        reads: list[tuple[Block, Sequence[int]]] = []
        meta = KVBatchMeta(call.partition_id, sample_ids=list(call.sample_ids), fields=list(call.fields))
        # Bind later rounds to the incarnations that the first one located: no row may be assembled from two lives.
        meta.handles = list(call.handles) if call.handles is not None else _handles(n, first)
        self._take(first, range(n), rounds, reads)
        while rounds.pending():
            if not await self._go_on(rounds, ctx):
                rounds.stop()
                break
            asked = rounds.pending()
            part = GetSamples(
                tuple(call.sample_ids[at] for at in asked),
                call.partition_id,
                call.fields,
                tuple(meta.handles[at] for at in asked),
            )
            try:
                got = await self.inner.execute(part, ctx)
            except PartialReadError as err:
                self._take(err, asked, rounds, reads)
            except DataPlaneError as err:
                rounds.record((), dict.fromkeys(asked, (err, err.retryable)))
            else:
                reads.append((Block.from_fields(got, len(asked), _but_enums(reads), ctx.env.codec), asked))
                rounds.record(asked, {})
        failed = rounds.errors
        came = [at for at in range(n) if at not in failed]
        where = {at: new for new, at in enumerate(came)}
        specs = _but_enums(reads)
        kept = [(block.spelled_out(), [where[at] for at in rows]) for block, rows in reads]
        block = assemble(kept, len(came), call.fields, specs, ctx.env.codec) if came else Block(0, {})
        if not failed:
            return block.to_tensordict()
        raise partial_read(meta, block, failed, op=ctx.verb)

    @staticmethod
    def _take(
        err: PartialReadError,
        asked: Sequence[int],
        rounds: Rounds[DataPlaneError],
        reads: list[tuple[Block, Sequence[int]]],
    ) -> None:
        """Store the rows and errors of one round."""
        came = [at for new, at in enumerate(asked) if new not in err.errors]
        if came:
            reads.append((err.block, came))
        rounds.record(came, {asked[new]: (e, e.retryable) for new, e in err.errors.items()})

    async def _go_on(self, rounds: Rounds[DataPlaneError], ctx: CallContext) -> bool:
        """Wait before another round, if deadline and budget allow one."""
        errors = [rounds.latest(at) for at in rounds.pending()]
        calm = all(isinstance(e, DataPlaneNotReady) for e in errors)
        wait_s = self.backoff.delay_s(rounds.used, ctx.env.rng)
        if calm:
            asked = max(getattr(e, "retry_after_s", None) or 0.0 for e in errors)
            wait_s = self.backoff.not_ready_s(asked, rounds.used, ctx.env.rng)
        if wait_s >= ctx.remaining():
            return False
        tokens = 1 + max(1, len({e.host for e in errors if e.host is not None}))
        if not calm and not ctx.env.budget.withdraw(ctx.env.clock.now(), tokens):
            ctx.emit("budget_refused", verb=ctx.verb, what="batch_retry")
            return False
        await ctx.pause(wait_s)
        ctx.emit("round", verb=ctx.verb, reason=type(errors[0]).__name__)
        return True


def _but_enums(reads: Sequence[tuple[Block, Sequence[int]]]) -> dict[str, FieldSpec]:
    """Return the specs of what was read, without enums: a vocabulary may grow between rounds, so words are kept."""
    return {name: spec for block, _ in reads for name, spec in block.specs.items() if not spec.enum}


def _handles(n: int, err: PartialReadError) -> list[RowHandle | None]:
    """Return the handles of the rows read and of those that failed, in the order of the request."""
    ok, failed = iter(err.ok.handles or [None] * err.ok.size), iter(err.failed.handles or [None] * err.failed.size)
    return [next(failed) if at in err.errors else next(ok) for at in range(n)]
