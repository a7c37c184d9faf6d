"""Pictures as SVG for every program here: lanes of spans, and line and bar charts."""
