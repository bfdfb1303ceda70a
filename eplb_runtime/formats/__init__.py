"""Files of others: one file an engine, loads and placements alike. Files only: no engine is imported."""
