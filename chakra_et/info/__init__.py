"""Show what .et files hold: columns in, one dict per file out, as JSON or as text."""
