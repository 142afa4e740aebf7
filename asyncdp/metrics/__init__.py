"""What can be measured: histograms, snapshots, observers of calls and attempts, and exporters for them.

The exporters need extras: :mod:`asyncdp.metrics.prometheus` needs ``asyncdp[prometheus]``,
:mod:`asyncdp.metrics.opentelemetry` needs ``asyncdp[otel]``.
"""
