"""A run in the formats of other tools: Perfetto, Chrome, TensorBoard, tables."""
