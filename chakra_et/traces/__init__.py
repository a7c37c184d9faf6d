"""Read recorded traces: JSON files in, columns out.

``host.HostTrace`` is what the ExecutionTraceObserver wrote, ``device.DeviceTrace`` what Kineto wrote, each as
numpy columns with one row per record; ``sets`` finds the traces of a folder, ``records`` decodes their JSON
piece by piece within ``limits``. The format's field names of all known writers stand here and nowhere else.
"""
