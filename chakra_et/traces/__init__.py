"""Read recorded traces: JSON files in, columns out.

``host.HostTrace`` has the records of the ExecutionTraceObserver, ``device.DeviceTrace`` those of Kineto, as
numpy columns with one row per record. ``sets`` finds the traces of a folder, and ``records`` decodes their
JSON piece by piece. Only this package has field names of the trace formats.
"""
