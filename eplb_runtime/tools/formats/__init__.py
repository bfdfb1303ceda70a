"""Files of others, loads and placements alike, known by their content. Files only: no engine is imported."""
