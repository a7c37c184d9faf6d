"""Charts as SVG for every program here."""
