"""Files of others: one file an engine, loads and placements alike. Files only: no engine is imported.

``loads.py`` and ``convert.py`` are the way in. They open a file by its ending (``reading.py``), then ask the engines
one by one (``engines.py``) whether it is theirs: a file is known by its content, not by a name.
"""
